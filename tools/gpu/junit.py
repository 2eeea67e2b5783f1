"""A pytest plugin: rank 0 writes its report to the file HALOX_JUNIT, and the name of the running test to a second file.

If all files of a run are skipped as a whole, the plugin makes pytest exit with status 0 on all ranks. Otherwise pytest
would exit with its status for "no tests", and the launcher would kill the other ranks, perhaps before rank 0 has
written its report.
"""

from __future__ import annotations

import ast
import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

_WHOLE_FILE = "collection skipped"


def running(report: Path) -> str:
    """Return the last test that started in a run without a report, or an empty string."""
    beside = _beside(report)
    return beside.read_text() if beside.exists() and not report.exists() else ""


def _beside(report: Path) -> Path:
    return report.with_suffix(".running")


class _Running:
    """Writes the name of each test as it starts, to identify the test in which a run died."""

    def __init__(self, report: Path) -> None:
        self._file = _beside(report)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._file.write_text(nodeid)


def reason(skipped: ElementTree.Element) -> str:
    """Return the reason from the report of a skipped test or of a file skipped as a whole."""
    message = skipped.get("message") or ""
    if message != _WHOLE_FILE:
        return message
    # The text is a tuple: file, line, reason.
    with suppress(ValueError, SyntaxError):
        *_, message = ast.literal_eval(skipped.text or "")
    return str(message).removeprefix("Skipped: ")


class _Skips:
    """Sets exit status 0 if a run contains no tests because whole files are skipped, and for no other reason."""

    def __init__(self) -> None:
        self._skipped, self._deselected = 0, 0

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._skipped += report.skipped

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self._deselected += len(items)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        is_empty = exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED
        if is_empty and self._skipped and not self._deselected:
            session.exitstatus = pytest.ExitCode.OK


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Have rank 0 write the report; other ranks write no report."""
    config.pluginmanager.register(_Skips())
    rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0"))
    if rank == "0" and "HALOX_JUNIT" in os.environ:
        config.option.xmlpath = os.environ["HALOX_JUNIT"]
        config.pluginmanager.register(_Running(Path(config.option.xmlpath)))
