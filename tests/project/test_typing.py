"""Types of fields, as mypy sees them in users' programs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

api = pytest.importorskip("mypy.api")

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import numpy as np
import halox

def step(grid: halox.Grid) -> None:
    grid.exchange(grid.zeros())

cpu = halox.Grid((4, 4), device="cpu", halo=2, periodic=True)
u = cpu.zeros()
reveal_type(u)                           # numpy.ndarray[Any, Any]
reveal_type(cpu.full_like(u, 1))         # numpy.ndarray[Any, Any]
reveal_type(cpu.interior(u))             # numpy.ndarray[Any, Any]
reveal_type(cpu.declare(np.ones(3)))     # numpy.ndarray
reveal_type(halox.Grid((4, 4)).zeros())  # Any
with halox.Grid(4, device="cpu") as grid:
    reveal_type(grid.scatter(None))      # numpy.ndarray[Any, Any]
step(cpu)
plan = cpu.plan(u, np.ones(3))
plan(u)
cpu.histogram(u, np.ones(3), np.ones(2))
cpu.exchange(3)                          # error: arg-type
halox.Grid((4, 4)).exchange([u])         # error: arg-type
cpu.sum(3)                               # error: arg-type
plan(3)                                  # error: arg-type
halox.Grid((4, 4), device="tpu")         # error: call-overload
halox.Grid((4, 4), halos=2)              # error: call-overload
halox.exchange(u)                        # error: operator
"""


def test_mypy_knows_the_arrays_and_refuses_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    monkeypatch.setenv("MYPYPATH", str(ROOT))
    options = ["--strict", f"--cache-dir={ROOT / '.mypy_cache'}"]
    options.append(f"--config-file={ROOT / 'pyproject.toml'}")
    said, errors, _ = api.run([*options, str(path)])
    assert not errors
    found = {}
    for line in said.splitlines():
        if match := re.search(r'program\.py:(\d+): note: Revealed type is "(.*)"', line):
            found[int(match[1])] = match[2]
        elif match := re.search(r"program\.py:(\d+): error: .*\[([\w-]+)\]$", line):
            found[int(match[1])] = f"error: {match[2]}"
    for number, line in enumerate(PROGRAM.splitlines(), 1):
        _, _, expected = line.partition("# ")
        actual = found.pop(number, "")
        assert actual == expected or (expected and actual.startswith(expected)), (line, actual)
    assert not found
