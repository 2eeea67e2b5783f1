"""Runs every asv benchmark once, with small parameters, to find broken ones."""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import support

FOLDER = Path(__file__).resolve().parents[2] / "asv_bench"
MODULES = sorted(path.stem for path in (FOLDER / "benchmarks").glob("*.py"))
KINDS = ("time_", "track_", "peakmem_", "mem_")


def classes(module: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    monkeypatch.syspath_prepend(str(FOLDER))
    found = importlib.import_module(f"benchmarks.{module}")
    for name, value in inspect.getmembers(found, inspect.isclass):
        if value.__module__ == found.__name__ and not name.startswith("_"):
            yield value


@pytest.mark.parametrize("module", [m for m in MODULES if m != "__init__"])
def test_benchmarks_run(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    support.require("mpi")
    ran = 0
    for found in classes(module, monkeypatch):
        benchmark: Any = found.small() if hasattr(found, "small") else found()
        cache = [benchmark.setup_cache()] if hasattr(benchmark, "setup_cache") else []
        params = getattr(benchmark, "params", ())
        for name, method in inspect.getmembers(benchmark, callable):
            if not name.startswith(KINDS):
                continue
            for chosen in itertools.product(*params):
                result = method(*cache, *chosen)
                ran += 1
                if name.startswith("track_"):
                    assert result == result and result > 0, (name, chosen, result)
    assert ran > 0


def test_configuration() -> None:
    conf = json.loads((FOLDER / "asv.conf.json").read_text())
    assert (FOLDER / conf["repo"] / "pyproject.toml").is_file()
    assert (FOLDER / conf["benchmark_dir"]).is_dir()
