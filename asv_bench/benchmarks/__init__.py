"""Benchmarks for asv: each class is a case of ``halox bench`` with its parameters, and tracks figures of its rows.

``tests/unit/bench/test_asv.py`` runs each class once, with the small parameters `few`.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, ClassVar, Self

SELECTED = "selected"
Measured = dict[str, dict[str, dict[str, Any]]]
"""Rows by the name of the case and the name of the method."""


class Rows:
    """Base of the benchmarks.

    Notes
    -----
    asv keeps the result of ``setup_cache`` by the line that defines it: each class defines its own, which returns
    ``self.measured()``.
    """

    command: ClassVar[str]
    """Words of the command; ``{name}`` stands for all values of a parameter with commas between."""

    case: ClassVar[str]
    """Name of a row's case, given the values of the parameters."""

    few: ClassVar[tuple[list[Any], ...]]
    """Parameters of a small run."""

    params: tuple[list[Any], ...]
    param_names: ClassVar[tuple[str, ...]]
    ranks = 1
    timeout = 900
    batches = 11

    @classmethod
    def small(cls) -> Self:
        """Return an instance with little to do."""
        tiny = cls()
        tiny.params, tiny.batches, tiny.ranks = cls.few, 1, min(cls.ranks, 2)
        return tiny

    def measured(self) -> Measured:
        """Run the command once, for all values of the parameters."""
        given = zip(self.param_names, self.params, strict=True)
        values = {name: ",".join(map(str, found)) for name, found in given}
        words = f"{self.command.format(**values)} --repeats {self.batches}".split()
        found: Measured = {}
        for row in rows_of(words, self.ranks, self.timeout):
            found.setdefault(row["case"], {})[row["name"]] = row
        return found

    def row(self, measured: Measured, chosen: tuple[Any, ...], name: str) -> dict[str, Any]:
        """Return the row of a method for some values of the parameters."""
        return measured[self.case.format(**dict(zip(self.param_names, chosen, strict=True)))][name]


def rows_of(words: list[str], ranks: int, limit_s: float) -> list[dict[str, Any]]:
    """Return the rows of ``halox bench``; `RuntimeError` if a method failed or gave a wrong result.

    One rank is this process, since asv has a process for each benchmark.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = ["bench", *words, "-n", str(ranks), "--no-graph", "--json", str(file)]
        if ranks == 1:
            from halox.cli import main  # here alone: asv starts a process for each figure

            with redirect_stdout(io.StringIO()) as out:
                status = main(command)
            said = out.getvalue()
        else:
            ended = subprocess.run(
                [sys.executable, "-m", "halox", *command],
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=False,
            )
            status, said = ended.returncode, f"{ended.stdout}{ended.stderr}"
        if status != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{said}")
        rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return rows


def track(unit: str, figure: Callable[[Callable[[str], dict[str, Any]]], Any]) -> Any:
    """Return a method that tracks a figure of the rows of a case, which are found by their methods' names."""

    def tracked(self: Rows, measured: Measured, *chosen: Any) -> float:
        return float(figure(lambda name: self.row(measured, chosen, name)))

    tracked.unit = unit  # type: ignore[attr-defined]
    return tracked


def us_of(name: str = SELECTED) -> Any:
    """Return a method that tracks the time of a method of the benchmark."""
    return track("us", lambda row: row(name)["us"])


def ratio(baseline: str, name: str = SELECTED) -> Any:
    """Return a method that tracks a time over a baseline's, of the same run."""
    return track("ratio", lambda row: row(name)["us"] / row(baseline)["us"])


def detail(unit: str, entry: str, name: str = SELECTED) -> Any:
    """Return a method that tracks an entry of a row, such as a count of bytes."""
    return track(unit, lambda row: row(name)[entry])
