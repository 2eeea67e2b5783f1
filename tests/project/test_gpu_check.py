"""The GPU check, tested without a GPU: each test file runs once, and a failure is a failure."""

from __future__ import annotations

import json
import sys
from itertools import chain
from pathlib import Path

import pytest

from tests.support import require
from tools.gpu import check, suites
from tools.gpu.running import ROOT, run
from tools.gpu.suites import Suite


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_every_file_runs_once(gpus: int) -> None:
    of_ranks = list(chain(*suites.several_ranks(gpus)))
    on_two = [file for one in of_ranks if one.ranks == 2 and not one.how for file in one.files]
    assert sorted(on_two) == suites.rank_files()
    in_one = [*suites.one_process(gpus), *(one for one in of_ranks if one.ranks is None)]
    shards = [one for one in in_one if one.variables]
    failing = [one for one in in_one if one.files == [suites.FAILURES]]
    ran = [f for one in in_one if one not in shards and one not in failing for f in one.files]
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests/gpu").rglob("test_*.py")}
    absent = {suites.RANDOM_TYPES, suites.FAILURES}
    absent |= {suites.NCCL_FAILURES} if gpus == 1 else set()
    assert sorted(ran) == sorted(files - absent)
    assert {*chain(*(one.files for one in shards))} == {suites.RANDOM_TYPES}
    assert len({one.variables["HALOX_RANDOM_SHARD"] for one in shards}) == suites.SHARDS
    assert [bool(one.options) for one in failing] == ([True] * 3 if gpus == 1 else [False])


SKIPPED = "import pytest\npytest.importorskip('no_such_package')\ndef test_a(): pass\n"
OUTCOMES = """
import pytest
@pytest.fixture
def before(): raise ValueError
@pytest.fixture
def after(): yield; raise ValueError
def test_a(): assert False
def test_b(before): pass
def test_c(after): pass
def test_d(): pytest.skip('no GPU')
"""


@pytest.mark.parametrize(
    ("sources", "options", "expected"),
    [
        ([OUTCOMES], "", ["failed", "error", "error", "skipped", "exit status 1"]),
        ([SKIPPED], "", ["skipped"]),
        ([SKIPPED, "def test_a(): pass\n"], "", ["skipped", "passed"]),
        ([""], "", ["exit status 5"]),
        ([SKIPPED, "def test_a(): pass\n"], "-k nothing", ["skipped", "exit status 5"]),
        (["import no_such_package\n"], "", ["error", "exit status 2"]),
        (
            ["import os\ndef test_a(): pass\ndef test_b(): os._exit(0)\n"],
            "",
            ["passed", "exit status 0 in test_0.py::test_b"],
        ),
    ],
)
@pytest.mark.part(4)
def test_a_run_without_a_passing_test_has_failed(
    sources: list[str], options: str, expected: list[str], tmp_path: Path
) -> None:
    """Only files that are skipped as a whole may run nothing."""
    paths = [tmp_path / f"test_{n}.py" for n in range(len(sources))]
    for path, source in zip(paths, sources, strict=True):
        path.write_text(source)
    found = Suite([*map(str, paths)], options=[f"--rootdir={tmp_path}", *options.split()]).run()
    assert [one["outcome"] for one in found] == expected


@pytest.mark.full
def test_ranks_that_skip_a_file_are_no_failure(tmp_path: Path) -> None:
    require("mpi")
    path = tmp_path / "test_0.py"
    path.write_text(SKIPPED)
    (found,) = Suite([str(path)], 2, [f"--rootdir={tmp_path}"]).run()
    assert (found["test"], found["outcome"], found["ranks"]) == ("test_0.py", "skipped", 2)


def test_a_command_that_is_stuck_is_ended() -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    status, said = run(["-c", f"import subprocess; subprocess.run({sleep})"], quiet_s=2)
    assert status == 124 and said.endswith("printed nothing for 2 s")


@pytest.mark.parametrize(
    "broken",
    [
        {"tests": [{"outcome": "exit status 1"}]},
        {"figures": [{"name": "b", "failed": "exit status 1"}]},
        {"runs": [{"app": "milc", "exit_status": 1}]},
    ],
)
def test_the_result_fails_with_any_of_its_parts(
    broken: dict[str, list[dict[str, object]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "RESULT", tmp_path / "result.json")
    monkeypatch.setattr(check, "machine", lambda: {"gpus": ["G"]})
    result = check.Result("all")
    result.add(tests=[{"outcome": "passed"}, {"outcome": "skipped", "reason": "no GPU"}])
    written = json.loads(check.RESULT.read_text())
    assert (written["passed"], written["skipped"], written["failed"]) == (1, 1, 0)
    assert result.end()
    result.add(**broken)
    assert not result.end()
