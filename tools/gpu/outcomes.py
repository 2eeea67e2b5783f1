"""A pytest plugin: rank 0 writes the outcome of each test, as it ends, as a line of JSON to the file HALOX_OUTCOMES.

If all files of a run are skipped as a whole, the plugin makes pytest exit with status 0 on all ranks. Otherwise pytest
would exit with its status for "no tests", and the launcher would kill the other ranks, perhaps before rank 0 has ended.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest


def read(file: Path) -> tuple[list[dict[str, Any]], str | None]:
    """Return the outcomes in a file, and the test in which the run died: None if it ended, empty if unknown."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    last = lines[-1] if lines else {}
    died_in = None if "ended" in last else "" if "outcome" in last else last.get("test", "")
    return [line for line in lines if "outcome" in line], died_in


class _Plugin:
    """Records outcomes on rank 0, and counts skipped files and deselected tests on every rank."""

    def __init__(self, file: str | None) -> None:
        self._file = file
        self._skipped, self._deselected = 0, 0
        self._found: dict[str, Any] = {}

    def _write(self, **line: Any) -> None:
        if self._file is not None:
            with open(self._file, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._skipped += report.skipped
        if not report.passed:
            self._write(test=report.nodeid, **_outcome(report))

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self._deselected += len(items)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._found = {"outcome": "passed", "seconds": 0.0}
        self._write(test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._found["seconds"] = round(self._found["seconds"] + report.duration, 3)
        if not report.passed and self._found["outcome"] == "passed":
            self._found |= _outcome(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(test=nodeid, **self._found)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        is_empty = exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED
        if is_empty and self._skipped and not self._deselected:
            session.exitstatus = pytest.ExitCode.OK
        self._write(ended=True)


def _outcome(report: pytest.CollectReport | pytest.TestReport) -> dict[str, str]:
    """Return the outcome of a test or file that did not pass: a failure outside a test function is an error."""
    if report.failed:
        return {"outcome": "failed" if report.when == "call" else "error"}
    # The description of a skip is a tuple: file, line, reason.
    why = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return {"outcome": "skipped", "reason": why.removeprefix("Skipped: ")}


def pytest_configure(config: pytest.Config) -> None:
    """Have rank 0 write the file."""
    rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0"))
    file = os.environ.get("HALOX_OUTCOMES") if rank == "0" else None
    config.pluginmanager.register(_Plugin(file))
