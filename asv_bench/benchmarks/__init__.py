"""Benchmarks for asv; the base of benchmarks that run ``halox bench`` and track figures of its rows.

``tests/unit/test_asv.py`` runs each of them once, small: a class may have a method ``small()`` that returns an instance
with little to do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self

SELECTED = "selected"
Rows = dict[str, dict[str, Any]]
"""Rows of one case, by the method's name."""

Measured = dict[tuple[Any, ...], Rows]
"""Rows by the values of the parameters."""


class Commanded:
    """Base of the benchmarks.

    Notes
    -----
    asv keeps the result of ``setup_cache`` by the line that defines it: each class defines its own, which returns
    `measured`.
    """

    kind: ClassVar[str]
    words: ClassVar[str]
    """Options of the command; ``{name}`` stands for the values of a parameter with commas between."""

    few: ClassVar[tuple[list[Any], ...]]
    """Parameters of a small run."""

    params: tuple[list[Any], ...]
    param_names: ClassVar[tuple[str, ...]]
    ranks = 1
    timeout = 600
    number = 1
    batches = 21

    @classmethod
    def small(cls) -> Self:
        """Return an instance with little to do."""
        tiny = cls()
        tiny.params, tiny.batches = cls.few, 1
        return tiny

    def key(self, row: dict[str, Any], ranks: int) -> tuple[Any, ...] | None:
        """Return the values of the parameters of a row, None to leave it out."""
        raise NotImplementedError

    def measured(self) -> Measured:
        """Run the command once for each number of ranks."""
        given = dict(zip(self.param_names, self.params, strict=True))
        values = {name: ",".join(map(str, found)) for name, found in given.items()}
        found: Measured = {}
        for ranks in given.get("ranks", [self.ranks]):
            words = f"{self.words.format(**values)} --repeats {self.batches}".split()
            if ranks > 1:
                words += ["-n", str(ranks)]
            for row in rows_of(self.kind, words, self.timeout):
                key = self.key(row, ranks)
                if key is not None:
                    found.setdefault(key, {})[row["name"]] = row
        return found


def rows_of(kind: str, words: list[str], limit_s: float) -> list[dict[str, Any]]:
    """Return the rows of ``halox bench KIND``."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        ended = subprocess.run(
            [sys.executable, "-m", "halox", "bench", kind, *words, "--json", str(file)],
            env=dict(os.environ),
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        if ended.returncode != 0:
            raise RuntimeError(f"{kind} {' '.join(words)} failed:\n{ended.stdout}{ended.stderr}")
        rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return rows


def track(unit: str, figure: Callable[[Rows], Any]) -> Callable[..., float]:
    """Return a method that tracks a figure of the rows of a case."""

    def tracked(self: Any, measured: Measured, *chosen: Any) -> float:
        value = figure(measured[chosen])
        return float("nan") if value is None else float(value)

    tracked.unit = unit  # type: ignore[attr-defined]
    return tracked


def time_of(name: str = SELECTED) -> Callable[..., float]:
    """Return a method that tracks the time of a method of the benchmark."""
    return track("us", lambda rows: rows[name]["us"])


def ratio(*baselines: str, name: str = SELECTED, entry: str = "us") -> Callable[..., float]:
    """Return a method that tracks a time over the fastest of some baselines' times."""
    return track(
        "ratio",
        lambda rows: rows[name][entry] / min(rows[one][entry] for one in baselines if one in rows),
    )
