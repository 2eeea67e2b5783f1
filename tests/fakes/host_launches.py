"""Stand-ins for the launches of `halox.packing.device`: NumPy copies in host memory, with shifted addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np

from halox.packing.refine import Side, cut_parts
from halox.runtime.gpu.marks import Mark


def leave(mark: Mark) -> None:
    """Write a mark, as a kernel does when it starts."""
    words = (ctypes.c_uint32 * 4).from_address(mark.pointer)
    words[0] = not mark.is_end
    if mark.is_end:
        words[1] = 1
    for number, at in enumerate(
        (ctypes.c_uint64 * mark.messages).from_address(mark.names or mark.pointer), 1
    ):
        found = ctypes.c_uint32.from_address(at).value
        if found != mark.name:
            words[2:4] = found, number


def touched(endpoint: Any) -> np.ndarray:
    """Return the addresses of an endpoint's bytes, in packed order."""
    found, datatype, count = endpoint
    blocks = datatype.blocks(count)
    ranges = [np.arange(n) + o for o, n in zip(blocks.offsets, blocks.lengths, strict=True)]
    return found.pointer + np.concatenate(ranges)


def side_of(side: Side) -> np.ndarray:
    """Return the addresses of the bytes of strided blocks, in packed order."""
    offsets = side.strided.offsets()[:, None] + np.arange(side.strided.block_bytes)
    return (side.pointer + offsets).ravel()


Step = tuple[np.ndarray, np.ndarray, Any]
"""Source addresses and target addresses of bytes, and the dtype for addition; None for a copy."""


class HostLaunch:
    """Writes the mark, then runs the steps; `launch` blocks."""

    def __init__(
        self, steps: Sequence[Step], keep: object = None, mark: Mark | None = None
    ) -> None:
        self.steps, self.keep, self._mark = steps, keep, mark

    def launch(self, stream: Any = None, source: int = 0, target: int = 0) -> None:
        if self._mark is not None:
            leave(self._mark)
        for read, written, dtype in self.steps:
            if not read.size:
                continue
            values = _load(_shifted(read, source))
            to = _shifted(written, target)
            if dtype is not None:
                values = (_load(to).view(dtype) + values.view(dtype)).view("u1")
            _store(to, values)


def _shifted(addresses: np.ndarray, shift: int) -> np.ndarray:
    return (addresses.astype("u8") + np.uint64(shift)).astype("i8")


def _memory(addresses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the memory around some addresses, which are in one array, and the addresses' offsets in it."""
    first = int(addresses.min())
    nbytes = int(addresses.max()) - first + 1
    return np.frombuffer((ctypes.c_char * nbytes).from_address(first), "u1"), addresses - first


def _load(addresses: np.ndarray) -> np.ndarray:
    memory, at = _memory(addresses)
    return memory[at]


def _store(addresses: np.ndarray, values: np.ndarray) -> None:
    memory, at = _memory(addresses)
    memory[at] = values


def _both(endpoint: Any, packed: int) -> tuple[np.ndarray, np.ndarray]:
    array = touched(endpoint)
    return array, packed + np.arange(len(array))


def _pack(moves: Any, device: int, mark: Mark | None = None, pairs: Any = ()) -> HostLaunch:
    steps = [(*_both(*move), None) for move in moves]
    return HostLaunch([*steps, *_between(pairs, "copy", device).steps], mark=mark)


def _unpack(moves: Any, device: int, mark: Mark | None = None) -> HostLaunch:
    return HostLaunch([(*_both(*move)[::-1], None) for move in moves], mark=mark)


def _add(moves: Any, device: int, mark: Mark | None = None) -> HostLaunch:
    return HostLaunch([(*_both(*move)[::-1], move[0][1].uniform) for move in moves], mark=mark)


def _fragments(moves: Any, fragments: int, device: int, *, unpack: bool) -> list[HostLaunch]:
    steps: list[list[Step]] = [[] for _ in range(fragments)]
    for endpoint, packed, ends in moves:
        found, datatype, count = endpoint
        parts = cut_parts(found.pointer, datatype, count, packed, ends, unpack=unpack)
        if isinstance(parts, int):
            both = _both(endpoint, packed)
            steps[parts].append((*(both[::-1] if unpack else both), None))
            continue
        for fragment, copies in zip(steps, parts, strict=True):
            fragment += [(side_of(c.source), side_of(c.target), None) for c in copies]
    return [HostLaunch(fragment) for fragment in steps]


def _between(pairs: Any, operation: str, device: int) -> HostLaunch:
    return HostLaunch(
        [(touched(a), touched(b), b[1].uniform if operation == "add" else None) for a, b in pairs]
    )


def _zeros(endpoints: Any, device: int) -> HostLaunch:
    zeros = np.zeros(max(len(touched(endpoint)) for endpoint in endpoints), "u1")
    at = zeros.ctypes.data + np.arange(zeros.size)
    return HostLaunch([(at[: len(t)], t, None) for t in map(touched, endpoints)], keep=zeros)


FAKES: dict[str, Callable[..., Any]] = {
    "launch_pack": _pack,
    "launch_unpack": _unpack,
    "launch_add": _add,
    "fragment_launches": _fragments,
    "launch_between": _between,
    "launch_zeros": _zeros,
}
"""Stand-ins for the functions of `halox.packing.device`, by name."""


@contextmanager
def host_launches(wrap: Callable[[HostLaunch], Any] = lambda made: made) -> Iterator[None]:
    """Patch `halox.packing.device` with `FAKES`; ``wrap`` may replace each launch."""

    def wrapped(make: Callable[..., Any], *args: Any, **options: Any) -> Any:
        made = make(*args, **options)
        return [*map(wrap, made)] if isinstance(made, list) else wrap(made)

    with ExitStack() as stack:
        for name, fake in FAKES.items():
            stack.enter_context(patch(f"halox.packing.device.{name}", partial(wrapped, fake)))
        yield
