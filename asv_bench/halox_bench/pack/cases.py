"""The catalogue of benchmark patterns, and the choice of cases from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from halox.errors import HaloxError
from halox_bench.pack import applications, synthetic
from halox_bench.pack.patterns import Pattern


def catalogue() -> dict[str, Pattern]:
    """Return all patterns by name."""
    return {pattern.name: pattern for pattern in (*synthetic.PATTERNS, *applications.PATTERNS)}


def select(
    wanted: Sequence[str] = (), *, quick: bool = False, among: Iterable[Pattern] | None = None
) -> list[Any]:
    """Return the cases that match one of some shell patterns, by ``pattern`` or ``pattern/size``.

    Parameters
    ----------
    wanted : sequence of str
        ``"vector"``, ``"NAS_*"`` or ``"vector/128B-*"``; empty means all.
    quick : bool
        Whether a pattern without a size has only the sizes of a quick run.
    among : iterable of Pattern, optional
        By default all of the catalogue.

    Raises
    ------
    HaloxError
        If one of them matches nothing.

    Examples
    --------
    >>> [case.name for case in select(["NAS_LU_y/12"])]
    ['NAS_LU_y/12']
    """
    known = catalogue() if among is None else {pattern.name: pattern for pattern in among}
    _check(wanted, known)
    return [*_selected(wanted, known, quick)]


def _selected(wanted: Sequence[str], known: dict[str, Pattern], quick: bool) -> Iterator[Any]:
    for pattern in known.values():
        whole = not wanted or any(fnmatchcase(pattern.name, name) for name in wanted)
        sizes = [
            size
            for name, slash, size in (word.partition("/") for word in wanted)
            if slash and fnmatchcase(pattern.name, name)
        ]
        for case in pattern.make() if whole or sizes else ():
            by_size = any(fnmatchcase(case.size, size) for size in sizes)
            if by_size or (whole and (not quick or case.size in pattern.quick)):
                yield case


def _check(wanted: Sequence[str], known: dict[str, Pattern]) -> None:
    for name in wanted:
        family, _, size = name.partition("/")
        found = [pattern for pattern in known.values() if fnmatchcase(pattern.name, family)]
        if not found:
            raise HaloxError(
                f"--patterns: no pattern is called {name!r}; known are {', '.join(known)}"
            )
        if size and not any(fnmatchcase(case.size, size) for p in found for case in p.make()):
            sizes = ", ".join(case.size for p in found for case in p.make())
            raise HaloxError(f"--patterns: {name!r} names no size of {family}; its sizes: {sizes}")
