"""Requirements of the tests on the machine, and runs of halox in processes of their own."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

ROOT = Path(__file__).resolve().parents[1]

FULL = "HALOX_TEST_FULL"
"""Environment variable that selects the whole matrix of test cases."""


def trials(number: int) -> int:
    """Return how many of ``number`` random cases to test: all in the whole matrix, else an eighth but at least 12."""
    return number if os.environ.get(FULL) else max(number // 8, min(number, 12))


def becomes(condition: Callable[[], object], limit_s: float = 120.0) -> bool:
    """Wait until another thread or process meets a condition; return False after ``limit_s`` seconds.

    The limit ends only tests that fail, since it far exceeds the time that a busy machine needs.
    """
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def forget_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `is_capturing` look up CuPy again, now and after the test, since a simulated GPU takes its place."""
    from halox.runtime.gpu import streams

    monkeypatch.setattr(streams, "_query", functools.cache(streams._query.__wrapped__))


def full(*cases: Any) -> list[Any]:
    """Cases for ``parametrize`` that run in the whole matrix only; a tuple is a case of several parameters."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full)
        for case in cases
    ]


def others(items: Iterable[pytest.Item], part: int) -> Iterator[pytest.Item]:
    """Yield the cases of tests that are not in the first ``part``-th of all cases of their test, at least one.

    The order is that of a digest of the parameters: the part has values of each, it is the same in all processes, and
    tests with the same parameters have the same part.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("full") is None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        cases.sort(key=lambda item: crc32(item.nodeid.partition("[")[2].encode()))
        yield from cases[-(-len(cases) // part) :]


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _missing(need: str) -> str | None:
    if need == "mpi":
        return None if _has("mpi4py") else "mpi4py is not installed"
    if need == "cxx":
        return None if shutil.which("g++") else "no g++ on the PATH"
    if need == "nvrtc":
        return None if _has("cuda") and _has("cuda.bindings") else "cuda-bindings is not installed"
    if need == "gpu":
        from halox.runtime.gpu.cuda import why_no_gpu

        return why_no_gpu()
    if need == "setuptools":
        found = importlib.metadata.version("setuptools") if _has("setuptools") else "none"
        fits = found != "none" and tuple(map(int, found.split(".")[:2])) >= (77, 0)
        return None if fits else f"setuptools 77 or newer is needed to build a wheel, found {found}"
    if need == "sphinx":
        missing = [
            name for name in ("sphinx", "myst_parser", "furo", "sphinx_design") if not _has(name)
        ]
        return f"{', '.join(missing)} not installed; pip install --group docs" if missing else None
    if need == "netns":
        from tests.netns import why_none

        reason = why_none()
        return None if reason is None else f"NOT RUN on two network namespaces: {reason}"
    if need in ("rate", "delay"):
        from tests import netns

        reason = netns.why_no_rate() if need == "rate" else netns.why_no_delay()
        return None if reason is None else f"NOT RUN over a link of known {need}: {reason}"
    raise ValueError(f"unknown need {need!r}")


def require(need: str) -> None:
    """Skip the calling test if ``need`` is missing, or fail it if HALOX_REQUIRE lists ``need``."""
    reason = _missing(need)
    if reason is None:
        return
    if need in os.environ.get("HALOX_REQUIRE", "").split(","):
        pytest.fail(f"HALOX_REQUIRE lists {need!r}, but {reason}")
    pytest.skip(reason, allow_module_level=True)


def halox(
    *words: str,
    timeout_s: float = 500,
    cwd: Path | None = None,
    given: str = "",
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run the command ``halox`` in a new process, with ``given`` as its standard input."""
    require("mpi")
    return subprocess.run(
        [sys.executable, "-m", "halox", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        cwd=cwd,
        input=given,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def verified(app: str, *words: str) -> dict[str, Any]:
    """Run an app by ``halox run`` and return its figures. Fails unless the app reports them as verified."""
    ended = halox("run", app, *words, "--json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    figures: dict[str, Any] = json.loads(ended.stdout)
    assert figures["verified"] is True
    return figures


def halox_under_launcher(
    ranks: int, *words: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command ``halox`` on ranks started by an MPI launcher, rather than by halox itself."""
    require("mpi")
    from halox.cli import launcher

    environ = launcher.environment(ranks) | environment
    del environ[launcher.STARTED_BY_HALOX]
    return _launched(ranks, ["-m", "halox", *words], environ)


def on_ranks(ranks: int, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments on ranks started by an MPI launcher."""
    require("mpi")
    from halox.cli import launcher

    environ = {**launcher.environment(ranks), "PYTHONPATH": str(ROOT), **environment}
    return _launched(ranks, words, environ)


def _launched(
    ranks: int, words: Sequence[str], environ: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    from halox.cli import launcher

    return subprocess.run(
        launcher.command(launcher.find(), ranks, list(words)),
        env=environ,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def milc_data() -> Path:
    """Return the folder of MILC's sample lattice, HALOX_MILC_DATA or ../shared/milc; skip the test without it."""
    folder = Path(os.environ.get("HALOX_MILC_DATA") or ROOT.parent / "shared" / "milc")
    if not (folder / "lat.sample.l8").is_file():
        pytest.skip(
            f"MILC's sample is not in {os.path.relpath(folder, ROOT)}; set HALOX_MILC_DATA to its folder"
        )
    return folder
