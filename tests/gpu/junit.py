"""A pytest plugin that writes the report of rank 0 to the file that HALOX_JUNIT names."""

from __future__ import annotations

import os

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give rank 0 the file; the others write none."""
    rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0"))
    if rank == "0" and "HALOX_JUNIT" in os.environ:
        config.option.xmlpath = os.environ["HALOX_JUNIT"]
