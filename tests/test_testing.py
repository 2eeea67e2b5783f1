"""The plugin `halox.testing`, in runs of pytest on several ranks."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from textwrap import dedent

import pytest

from tests.support import on_ranks

HEAD = """
    import unittest

    import pytest
    from mpi4py import MPI

    import halox

    is_one = MPI.COMM_WORLD.rank == 1


    @pytest.fixture
    def grid():
        made = halox.Grid((12, 4), device="cpu")
        yield made
        made.close()


    @pytest.fixture(scope="module")
    def lasting():
        return halox.Grid((12, 4), device="cpu")
"""

SUITE = """
    def test_before(lasting):
        assert lasting.sum(lasting.ones()) == 48


    def test_assertion(grid, lasting):
        u = grid.ones()
        if is_one:
            assert u.max() == 2, "no two"
        grid.sum(u)


    def test_next(grid):
        assert grid.sum(grid.ones()) == 48


    def test_lasting(lasting):
        with pytest.raises(halox.errors.StateError):
            lasting.zeros()


    @pytest.fixture
    def file():
        if is_one:
            raise OSError("no file")


    def test_fixture(file, grid):
        pass


    def test_on_all(grid):
        assert grid.sum(grid.ones()) == 47


    def test_finalizer(grid, request):
        request.addfinalizer(lambda: 1 / (not is_one))


    @pytest.mark.xfail(strict=True)
    def test_expected():
        assert not is_one


    @pytest.mark.xfail(raises=AssertionError)
    def test_expected_error():
        assert not is_one


    def test_no_text():
        class NoText(Exception):
            def __str__(self):
                raise RuntimeError("no text")

        if is_one:
            raise NoText


    def test_skip(grid):
        if is_one:
            pytest.skip("no cake")


    class TestCase(unittest.TestCase):
        def test_method(self):
            if is_one:
                self.fail("no method")

        def test_skipped(self):
            if is_one:
                self.skipTest("no test")


    def test_last(grid, tmp_path, record_property):
        record_property("rank", MPI.COMM_WORLD.rank)
        assert grid.sum(grid.ones()) == 48
"""


def pytest_on_ranks(
    folder: Path, code: str, timeout_s: str, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    file = folder / "test_suite.py"
    file.write_text(dedent(HEAD) + dedent(code))
    words = ["-p", "halox.testing", "-p", "no:cacheprovider", "-rA", "--color=no", str(file)]
    words = ["-m", "pytest", "--rootdir", str(folder), *options, *words]
    # No other plugin is needed, every rank would import all of them, and options of this run may belong to one.
    settings = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    return on_ranks(2, *words, HALOX_TIMEOUT=timeout_s, **settings)


def test_outcomes_are_those_of_all_ranks(tmp_path: Path) -> None:
    results = tmp_path / "results.xml"
    files = f"--basetemp={tmp_path / 'folder'}", f"--junitxml={results}"
    # No rank waits so long for a failed rank.
    ended = pytest_on_ranks(tmp_path, SUITE, "600", options=files)
    said = ended.stdout
    assert ended.returncode != 0
    outcomes = re.findall(r"^(ERROR|FAILED|PASSED|XFAIL) \S+::(test_\w+)", said, re.MULTILINE)
    assert sorted(outcomes) == sorted(
        [
            ("PASSED", "test_before"),
            ("FAILED", "test_assertion"),
            ("PASSED", "test_next"),
            ("PASSED", "test_lasting"),
            ("ERROR", "test_fixture"),
            ("FAILED", "test_on_all"),
            ("PASSED", "test_finalizer"),
            ("ERROR", "test_finalizer"),
            ("XFAIL", "test_expected"),
            ("XFAIL", "test_expected_error"),
            ("FAILED", "test_no_text"),
            ("FAILED", "test_method"),
            ("PASSED", "test_last"),
        ]
    ), said
    # The report of a test names the rank, and has its traceback, but not those of ranks that have waited for it.
    report = re.search(r"_ test_assertion _+\n(.*?)\n_{5}", said, re.DOTALL)
    assert report and report[1].startswith("failed on rank 1: AssertionError: no two\n")
    assert "u.max() == 2" in report[1] and "ExchangeTimeoutError" not in report[1]
    assert "failed on rank 1: OSError: no file\n" in said
    assert said.count("skipped on rank 1: no cake") == said.count("skipped on rank 1: no test") == 1
    # The files are those of rank 0.
    assert re.findall('name="rank" value="(.*?)"', results.read_text()) == ["0"]


MESSAGE = """
    def test_message():
        if is_one:
            raise ValueError("no message")
        MPI.COMM_WORLD.recv(source=1)
"""

OTHER_TESTS = """
    if is_one:
        def test_more():
            pass


    def test_all():
        pass
"""

BROKEN = """
    if is_one:
        raise OSError("no module")
"""

EXIT = """
    import time


    def test_all():
        assert not is_one


    def test_exit():
        if is_one:
            pytest.exit("enough")


    @pytest.fixture(scope="session", autouse=True)
    def slow_report():
        yield
        time.sleep(not is_one)
"""

PHASES = """
    def test_uneven(subtests):
        for i in range(1 + is_one):
            with subtests.test(i=i):
                pass
"""


@pytest.mark.parametrize(
    ("code", "timeout_s", "texts"),
    [
        # A rank waits in MPI for a rank that has failed: the time-out ends all ranks.
        (
            MESSAGE,
            "2",
            [
                "ValueError: no message",
                r"rank 1 has waited for \d+ s for rank 0 after call of .*test_message; all ranks end",
            ],
        ),
        # The ranks know at once: none waits.
        (OTHER_TESTS, "600", ["ranks 0 and 1 have collected different tests: .*test_more"]),
        (BROKEN, "600", ["OSError: no module"]),
        (EXIT, "600", ["failed on rank 1: AssertionError", "1 failed", "rank 1 the session"]),
        (
            PHASES,
            "600",
            ["rank 0 has ended the teardown of .*, and rank 1 the call of .*test_uneven"],
        ),
    ],
    ids=["message", "other tests", "broken", "exit", "phases"],
)
@pytest.mark.part(2)
def test_runs_that_cannot_go_on(
    code: str, timeout_s: str, texts: list[str], tmp_path: Path
) -> None:
    """All ranks end with the reason; rank 0 prints its report before."""
    ended = pytest_on_ranks(tmp_path, code, timeout_s)
    said = ended.stdout + ended.stderr
    assert ended.returncode != 0
    assert not [text for text in texts if not re.search(text, said)], said
    assert ("passed" in ended.stdout) == (code == PHASES)
