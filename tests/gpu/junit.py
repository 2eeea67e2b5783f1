"""A pytest plugin: the report of rank 0 in the file that HALOX_JUNIT names, and the running test beside it.

A run of files that are skipped as a whole ends with status 0 on all ranks. pytest's own status is the same for these as
for a run without tests, and the first rank to end by it would end the others before rank 0 has written its report.
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
    """Return the test that was started last before a report could be written; empty if none was."""
    beside = _beside(report)
    return beside.read_text() if beside.exists() and not report.exists() else ""


def _beside(report: Path) -> Path:
    return report.with_suffix(".running")


class _Running:
    """Writes the test that runs, for a run that ends in none."""

    def __init__(self, report: Path) -> None:
        self._file = _beside(report)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._file.write_text(nodeid)


def reason(skipped: ElementTree.Element) -> str:
    """Return the reason of a skipped test, or of a file that is skipped as a whole, from the report."""
    message = skipped.get("message") or ""
    if message != _WHOLE_FILE:
        return message
    # The text is the file, the line and the reason.
    with suppress(ValueError, SyntaxError):
        *_, message = ast.literal_eval(skipped.text or "")
    return str(message).removeprefix("Skipped: ")


class _Skips:
    """Ends a run in which whole files are skipped, and no test is left out for another reason, with status 0."""

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
    """Give rank 0 the file; the others write none."""
    config.pluginmanager.register(_Skips())
    rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0"))
    if rank == "0" and "HALOX_JUNIT" in os.environ:
        config.option.xmlpath = os.environ["HALOX_JUNIT"]
        config.pluginmanager.register(_Running(Path(config.option.xmlpath)))
