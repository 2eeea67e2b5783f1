"""Every asv class runs once, small: its checks find no wrong result, and all of its figures are there."""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import support

KINDS_OF_OTHERS = {"Strided", "Transposes"}
"""Classes on ranks whose kind of benchmark another class runs, too; only the whole matrix has them."""

FOLDER = Path(__file__).resolve().parents[3] / "asv_bench"
MODULES = [path.stem for path in sorted((FOLDER / "benchmarks").glob("[!_]*.py"))]


def classes(module: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    monkeypatch.syspath_prepend(str(FOLDER))
    found = importlib.import_module(f"benchmarks.{module}")
    for _, value in inspect.getmembers(found, inspect.isclass):
        is_rare = module == "ranks" and value.__name__ in KINDS_OF_OTHERS
        if value.__module__ == found.__name__ and (support.FULL in os.environ or not is_rare):
            yield value


@pytest.mark.parametrize("module", MODULES)
def test_benchmarks_run(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    support.require("mpi")
    ran = set()
    for found in classes(module, monkeypatch):
        benchmark: Any = found.small() if hasattr(found, "small") else found()
        cache = [benchmark.setup_cache()] if hasattr(benchmark, "setup_cache") else []
        for name, method in inspect.getmembers(benchmark, callable):
            if not name.startswith(("time_", "track_")):
                continue
            for chosen in itertools.product(*benchmark.params):
                result = method(*cache, *chosen)
                assert name.startswith("time_") or result > 0, (name, chosen, result)
            ran.add(found)
    assert ran == {*classes(module, monkeypatch)}


def test_configuration() -> None:
    conf = json.loads((FOLDER / "asv.conf.json").read_text())
    assert (FOLDER / conf["repo"] / "pyproject.toml").is_file()
    assert (FOLDER / conf["benchmark_dir"]).is_dir()
