"""A pytest plugin: the report of rank 0 in the file that HALOX_JUNIT names, and the running test beside it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


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


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give rank 0 the file; the others write none."""
    rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0"))
    if rank == "0" and "HALOX_JUNIT" in os.environ:
        config.option.xmlpath = os.environ["HALOX_JUNIT"]
        config.pluginmanager.register(_Running(Path(config.option.xmlpath)))
