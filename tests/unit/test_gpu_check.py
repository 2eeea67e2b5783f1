"""The GPU check, tested without a GPU: digest of the sources, figures, and selection of runs."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest

from tests.faults.calls import GPU_PATHS, PEER_PATHS
from tests.faults.table import rows
from tests.support import require
from tools.gpu import apps, check, outcomes, suites
from tools.gpu.apps import fourier_figures, milc_figures
from tools.gpu.check import sources_sha256
from tools.gpu.running import ROOT, run
from tools.gpu.suites import Suite


def test_digest_of_sources(tmp_path: Path) -> None:
    package = tmp_path / "halox"
    for name, content in {"b.py": b"2", "a/z.cu": b"1", "a/__pycache__/z.pyc": b"no"}.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_bytes(content)
    wanted = hashlib.sha256(b"halox/a/z.cu\x001" + b"halox/b.py\x002").hexdigest()
    assert sources_sha256(tmp_path) == wanted


def test_fourier_figures() -> None:
    common = {"class": "C", "device": "gpu", "verified": True, "relative_error": 1e-13}
    common |= {"time_s": 1.0, "graph": True}
    runs = [
        {
            "app": "nas_ft",
            "ranks": ranks,
            "exit_status": 0,
            "figures": {**common, "mops": mops},
        }
        for ranks, mops in ((1, 2.0e6), (1, 2.1e6), (2, 1e6))
    ]
    bad = {"app": "nas_ft", "ranks": 4, "exit_status": 1, "figures": {"output": "no"}}
    found = fourier_figures([*runs, bad, {"app": "nas_mg", "exit_status": 0}])
    # Six times 340,300: the target.
    assert [one["target"] for one in found] == [2041800, 2041800, None]
    assert [one["met"] for one in found] == [False, True, None]
    assert fourier_figures([bad]) == []


def test_milc_figures() -> None:
    common = {"lattice": [16, 16, 16, 32], "operator": "improved", "precision": "double"}
    common |= {"device": "gpu", "verified": True, "time_s": 0.1, "graph": False}
    runs = [
        {
            "app": "milc",
            "ranks": ranks,
            "exit_status": status,
            "figures": {**common, "cg_gflops": gflops, "dslash_gflops": 2.0},
        }
        for ranks, gflops, status in ((1, 800.0, 0), (2, 600.0, 0), (4, 1.0, 1))
    ]
    mixed = {**runs[0], "figures": {**runs[0]["figures"], "precision": "mixed"}}
    found = milc_figures([*runs, mixed, {"app": "nas_mg", "exit_status": 0}])
    assert [(one["value"], one["baseline"]) for one in found] == [(800.0, 800.0), (600.0, 800.0)]
    assert found[1]["name"] == "MILC 16x16x16x32 improved double, 2 ranks, gpu"
    assert milc_figures(runs[2:]) == []


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_every_file_runs_once(gpus: int) -> None:
    of_ranks = list(chain(*suites.several_ranks(gpus)))
    on_two = [file for one in of_ranks if one.ranks == 2 and not one.how for file in one.files]
    assert sorted(on_two) == suites.rank_files()
    rest = [one for one in of_ranks if one.ranks is None]
    in_one = [*suites.one_process(gpus), *rest]
    shards = [one for one in in_one if one.variables]
    failing = [one for one in in_one if one.files == [suites.FAILURES]]
    rest = [one for one in in_one if one not in shards and one not in failing]
    ran = [file for one in rest for file in one.files]
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests/gpu").rglob("test_*.py")}
    absent = {suites.RANDOM_TYPES, suites.FAILURES}
    absent |= {suites.NCCL_FAILURES} if gpus == 1 else set()
    assert sorted(ran) == sorted(files - absent)
    assert {*chain(*(one.files for one in shards))} == {suites.RANDOM_TYPES}
    assert len({one.variables["HALOX_RANDOM_SHARD"] for one in shards}) == suites.SHARDS
    assert [bool(one.options) for one in failing] == ([True] * 3 if gpus == 1 else [False])


def test_every_failure_is_in_one_part(tmp_path: Path) -> None:
    """Tests with the names of all failures, selected by each part's expression, all run, and none of them twice."""
    names = [row.name for row in rows((*GPU_PATHS, *PEER_PATHS)) if row.is_quick]
    source = (
        f"import pytest\n@pytest.mark.parametrize('row', {names}, ids=str)\ndef test_a(row): pass\n"
    )
    (tmp_path / "test_0.py").write_text(source)
    ran = []
    for part in suites.FAILING:
        found = Suite([str(tmp_path / "test_0.py")], options=["-k", part, f"--rootdir={tmp_path}"])
        ran += [one["test"] for one in found.run()]
    assert sorted(ran) == sorted(f"test_0.py::test_a[{name}]" for name in names)


@pytest.mark.parametrize("name", sorted({*suites.BY_THEMSELVES, *suites.LONGEST_OF_RANKS}))
def test_a_file_has_the_name(name: str) -> None:
    assert any(suites.among(file, [name]) for file in suites.rank_files())


def test_a_run_that_dies_tells_what_ran(tmp_path: Path) -> None:
    ran = tmp_path / "test_of_this.py"
    ran.write_text("import os\ndef test_a(): pass\ndef test_b(): os._exit(3)\n")
    file = tmp_path / "outcomes"
    command = ["-m", "pytest", "-q", "-p", "tools.gpu.outcomes", f"--rootdir={tmp_path}", str(ran)]
    status, _ = run(command, variables={"HALOX_OUTCOMES": str(file)})
    (passed,), died_in = outcomes.read(file)
    assert (status, died_in) == (3, "test_of_this.py::test_b")
    assert passed["test"] == "test_of_this.py::test_a" and passed["outcome"] == "passed"


def test_outcomes(tmp_path: Path) -> None:
    """A failing test has failed, a failing fixture is an error, also after a test that passed."""
    source = [
        "import pytest, time",
        "@pytest.fixture",
        "def before(): raise ValueError",
        "@pytest.fixture",
        "def after(): yield; raise ValueError",
        "def test_a(): time.sleep(0.1); assert False",
        "def test_b(before): pass",
        "def test_c(after): pass",
        "def test_d(): pytest.skip('no GPU')",
    ]
    path = tmp_path / "test_0.py"
    path.write_text("\n".join(source))
    suite = Suite([str(path)], options=[f"--rootdir={tmp_path}"], how=", so")
    *found, status = suite.run()
    assert [one["test"] for one in found] == [f"test_0.py::test_{x}, so" for x in "abcd"]
    assert [one["outcome"] for one in found] == ["failed", "error", "error", "skipped"]
    assert found[0]["seconds"] >= 0.1 and found[3]["reason"] == "no GPU"
    assert status["outcome"] == "exit status 1"


@pytest.mark.parametrize(("gpus", "ranks"), [(1, [2]), (2, [2]), (4, [2, 4]), (8, [2, 4, 8])])
def test_one_command_measures_on_all_numbers_of_ranks(
    gpus: int, ranks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[tuple[str, Any]] = []
    ran: list[tuple[str, int]] = []
    result = SimpleNamespace(gpus=gpus, add=lambda **found: None, end=lambda: True)

    def app(name: str, number: int, *options: str) -> dict[str, Any]:
        ran.append((name, number))
        return {"app": name, "ranks": number, "exit_status": 1}

    def targets(result: object, kind: str, number: int | None, *words: object) -> None:
        kinds.append((kind, number))

    monkeypatch.setattr(check, "Result", lambda parts: result)
    monkeypatch.setattr(apps, "app", app)
    monkeypatch.setattr(check, "targets", targets)
    monkeypatch.setattr(check, "run_suites", None)  # no tests
    assert check.main(["--figures"]) == 0
    for kind in ("exchange", "allreduce", "transpose"):
        assert [number for name, number in kinds if name == kind] == ranks
    wanted = sorted({1, *range(1, min(gpus, 2) + 1), *ranks[1:]})
    assert sorted(number for name, number in ran if name == "nas_mg") == wanted


@pytest.mark.parametrize(
    ("words", "is_tested", "is_whole"),
    [
        ([], True, True),
        (["--several"], True, False),
        (["--figures"], False, False),
        (["--tests"], True, False),
    ],
)
def test_parts(
    words: list[str], is_tested: bool, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_figures = words != ["--tests"]
    ran: list[Suite] = []
    measured: list[tuple[str, int | None]] = []
    result = SimpleNamespace(gpus=1, add=lambda **found: None, end=lambda: False)
    monkeypatch.setattr(check, "Result", lambda parts: result)
    monkeypatch.setattr(check, "run_suites", lambda result, found, at_once: ran.extend(found))
    monkeypatch.setattr(
        check, "measure", lambda result, name, words, ranks: measured.append((name, ranks))
    )
    monkeypatch.setattr(apps, "run_all", lambda gpus: [])
    assert check.main(words) == 1  # as the result has failures
    together, alone = suites.several_ranks(1)
    wanted = [*together, *alone] if is_tested else []
    assert ran == wanted + (suites.one_process(1) if is_whole or not has_figures else [])
    assert (("halox bench exchange", 2) in measured) is has_figures
    assert (("nas_ft", None) in measured) is (("halox bench pack", None) in measured) is is_whole


def test_pairs_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """On four GPUs suites of two ranks run in pairs, each on its own GPUs, and other suites by themselves."""
    seen: dict[int, set[str]] = {}
    both = Barrier(2, timeout=30)

    def fake(suite: Suite, variables: Mapping[str, str]) -> list[dict[str, Any]]:
        seen.setdefault(suite.ranks or 1, set()).add(variables.get("CUDA_VISIBLE_DEVICES", "all"))
        if suite.ranks == 2:
            both.wait()
        return []

    monkeypatch.setattr(Suite, "run", fake)
    result = SimpleNamespace(gpus=4, add=lambda tests: None, timed=lambda name, began: None)
    check.run_alone(result, [Suite(["a"], 2), Suite(["b"], 2), Suite(["c"], 4)])  # type: ignore[arg-type]
    assert seen == {2: {"0,1", "2,3"}, 4: {"all"}}


def test_unknown_words_run_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--one"]) == 2
    assert "--several" in capsys.readouterr().out


def test_tests_alone_leave_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "RESULT", tmp_path / "result.json")
    monkeypatch.setattr(check, "TESTS", tmp_path / "tests.json")
    monkeypatch.setattr(check, "machine", lambda: {"gpus": ["G"]})
    check.Result("tests").add(tests=[{"outcome": "passed"}])
    assert [path.name for path in tmp_path.iterdir()] == ["tests.json"]


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> check.Result:
    """An empty result of a machine with one GPU, which processes started by the test do not see."""
    monkeypatch.setattr(check, "RESULT", tmp_path / "result.json")
    monkeypatch.setattr(check, "machine", lambda: {"gpus": ["G"]})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return check.Result("all")


SUITES = {
    "skipped": "import pytest\npytest.importorskip('no_such_package')\ndef test_a(): pass\n",
    "each test skipped": "import pytest\n@pytest.mark.skip('no zarr')\ndef test_a(): pass\n",
    "passing": "def test_a(): pass\n",
    "empty": "",
    "broken": "import no_such_package\n",
    "crashing": "import os\ndef test_a(): os._exit(0)\n",
    "dying": "import os\ndef test_a(): pass\ndef test_b(): os._exit(0)\n",
}
NO_PACKAGE = "could not import 'no_such_package': No module named 'no_such_package'"


@pytest.mark.parametrize(
    ("files", "options", "expected"),
    [
        ("skipped", "", ["skipped"]),
        ("each test skipped", "", ["skipped"]),
        ("skipped,passing", "", ["skipped", "passed"]),
        ("empty", "", ["exit status 5"]),
        ("passing", "-k nothing", ["exit status 5"]),
        ("skipped,passing", "-k nothing", ["skipped", "exit status 5"]),
        ("broken", "", ["error", "exit status 2"]),
        ("crashing", "", ["exit status 0 in test_0.py::test_a"]),
        ("dying", "", ["passed", "exit status 0 in test_0.py::test_b"]),
    ],
)
def test_only_files_that_are_skipped_may_run_nothing(
    files: str,
    options: str,
    expected: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    paths = [tmp_path / f"test_{n}.py" for n, _ in enumerate(files.split(","))]
    for path, name in zip(paths, files.split(","), strict=True):
        path.write_text(SUITES[name])
    words = [f"--rootdir={tmp_path}", *options.split()]
    found = Suite([*map(str, paths)], options=words).run()
    assert [one["outcome"] for one in found] == expected
    reason = NO_PACKAGE if files.startswith("skipped") else "no zarr"
    assert all(one["reason"] == reason for one in found if one["outcome"] == "skipped")
    is_told = f"all skipped: {reason}" in capfd.readouterr().out
    assert is_told == (set(expected) == {"skipped"})


def test_ranks_that_skip_a_file_are_no_failure(tmp_path: Path) -> None:
    require("mpi")
    path = tmp_path / "test_0.py"
    path.write_text(SUITES["skipped"])
    (found,) = Suite([str(path)], 2, [f"--rootdir={tmp_path}"]).run()
    assert (found["test"], found["outcome"], found["ranks"]) == ("test_0.py", "skipped", 2)


def test_a_benchmark_that_fails_has_failed(result: check.Result) -> None:
    check.measure(result, "nas_ft", ["tools.gpu.bench_nas_ft"], None)
    written = json.loads(check.RESULT.read_text())
    assert written["benchmarks"] == [{"name": "nas_ft on 1 rank(s)", "failed": "exit status 1"}]
    (launch,) = written["launches"]
    assert launch["name"] == "nas_ft on 1 rank(s)" and launch["seconds"] > 0
    assert not result.end()


def test_a_command_that_is_stuck_is_ended() -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    status, said = run(["-c", f"import subprocess; subprocess.run({sleep})"], quiet_s=2)
    assert status == 124 and said.endswith("printed nothing for 2 s")


def test_the_duration_of_each_launch_is_written(tmp_path: Path, result: check.Result) -> None:
    for name in ("skipped", "passing"):
        (tmp_path / f"test_{name}.py").write_text(SUITES[name])
    found = [
        Suite([str(path)], options=[f"--rootdir={tmp_path}"]) for path in tmp_path.glob("t*.py")
    ]
    check.run_suites(result, found, 2)
    launches = json.loads(check.RESULT.read_text())["launches"]
    assert sorted(one["name"] for one in launches) == sorted(suite.name for suite in found)
    assert all(one["seconds"] > 0 and one["at_s"] >= 0 for one in launches)


def test_the_result_is_written_after_each_step(result: check.Result) -> None:
    assert result.gpus == 1
    passing, skipped = {"outcome": "passed"}, {"outcome": "skipped", "reason": "no GPU"}
    result.add(tests=[passing, skipped], figures=[{"name": "a"}])
    written = json.loads(check.RESULT.read_text())
    assert (written["passed"], written["skipped"], written["failed"]) == (1, 1, 0)
    assert not written["ended"] and written["sources_sha256"] == sources_sha256()
    assert result.end() and json.loads(check.RESULT.read_text())["ended"]
    for broken in (
        {"tests": [{"outcome": "exit status 1"}]},
        {"figures": [{"name": "b", "failed": "exit status 1"}]},
        {"runs": [{"app": "milc", "exit_status": 1}]},
    ):
        result = check.Result("all")
        result.add(**broken)
        assert not result.end()
