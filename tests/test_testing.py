"""The plugin `halox.testing`, in runs of pytest on several ranks."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from textwrap import dedent

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


    def test_last(grid):
        assert grid.sum(grid.ones()) == 48
"""


def pytest_on_ranks(
    folder: Path, code: str, timeout_s: str, ranks: int = 2, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    file = folder / "test_suite.py"
    file.write_text(dedent(HEAD) + dedent(code))
    words = ["-p", "halox.testing", "-p", "no:cacheprovider", "-rA", "--color=no", str(file)]
    words = ["-m", "pytest", "--rootdir", str(folder), *options, *words]
    # No other plugin is needed, every rank would import all of them, and options of this run may belong to one.
    settings = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    return on_ranks(ranks, *words, HALOX_TIMEOUT=timeout_s, **settings)


def test_outcomes_are_those_of_all_ranks(tmp_path: Path) -> None:
    # No rank waits so long for a failed rank.
    ended = pytest_on_ranks(tmp_path, SUITE, "600", ranks=3)
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


def test_ranks_that_wait_for_a_rank_without_failure(tmp_path: Path) -> None:
    """A call of halox ends after HALOX_TIMEOUT, and the test fails; a call of MPI ends with all ranks."""
    code = """
        def test_waits():
            made = halox.Grid(12, device="cpu")
            if not is_one:
                made.zeros()


        def test_message():
            if is_one:
                raise ValueError("no message")
            MPI.COMM_WORLD.recv(source=1)
    """
    ended = pytest_on_ranks(tmp_path, code, "2")
    assert ended.returncode != 0
    said = ended.stdout + ended.stderr
    assert "test_suite.py F" in said and "ValueError: no message" in said
    assert re.search(
        r"halox.testing: rank 1 has waited for \d+ s for rank 0 after call of .*test_message; all ranks end",
        said,
    )


def test_ranks_with_different_tests_run_none(tmp_path: Path) -> None:
    code = """
        if is_one:
            def test_more():
                pass


        def test_all():
            pass
    """
    ended = pytest_on_ranks(tmp_path, code, "20")
    assert ended.returncode != 0
    assert "ranks 0 and 1 have collected different tests: " in ended.stderr
    assert "test_more" in ended.stderr and "passed" not in ended.stdout


def test_a_rank_that_ends_the_session(tmp_path: Path) -> None:
    """All ranks end without waiting for HALOX_TIMEOUT, and rank 0 prints its report before."""
    code = """
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
    ended = pytest_on_ranks(tmp_path, code, "600")
    assert ended.returncode != 0
    assert "1 failed" in ended.stdout and "rank 1 the session" in ended.stdout
    assert "failed on rank 1: AssertionError" in ended.stdout


def test_files_of_ranks_and_different_phases(tmp_path: Path) -> None:
    code = """
        def test_folder(tmp_path, record_property):
            record_property("rank", MPI.COMM_WORLD.rank)


        def test_uneven(subtests):
            for i in range(1 + is_one):
                with subtests.test(i=i):
                    pass
    """
    results = tmp_path / "results.xml"
    files = f"--basetemp={tmp_path / 'folder'}", f"--junitxml={results}"
    ended = pytest_on_ranks(tmp_path, code, "20", options=files)
    said = results.read_text()
    assert ended.returncode != 0 and "<error" not in said
    assert re.findall('name="rank" value="(.*?)"', said) == ["0"]
    assert re.search(
        "rank 0 has ended the teardown of .*, and rank 1 the call of .*test_uneven", ended.stdout
    )


def test_an_error_of_collection_on_one_rank(tmp_path: Path) -> None:
    ended = pytest_on_ranks(
        tmp_path, '\nif is_one:\n    raise OSError("no module")\n', "20", ranks=2
    )
    assert ended.returncode != 0 and "OSError: no module" in ended.stderr
