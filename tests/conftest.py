"""Order of the tests, and their distribution over processes."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import pkgutil
import sys
import tempfile
from collections.abc import Generator

import pytest

from halox import packing, paths, runtime
from halox.cli.launcher import mpi_defaults, running_ranks
from tests import launching, support
from tests.support import others

SESSION_FOLDERS = "PRTE_MCA_prte_tmpdir_base"
"""Variable of Open MPI 5 that names the folder for its session folders, by default ``/tmp``."""

LAUNCHES = ("tests/test_", "tests/faults/")
"""Tests that start ranks and mostly wait for them. They run first, in one process, while other processes compute."""


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run whole folders on several cores if pytest-xdist is installed, unless the command line says otherwise."""
    options = config.option
    if getattr(options, "numprocesses", 0) is not None or options.dist != "no":
        return
    if options.usepdb or options.collectonly or "PYTEST_XDIST_WORKER" in os.environ:
        return
    # All ranks must run the same test at the same time, and processes would compete for the GPU.
    if running_ranks() is not None or importlib.util.find_spec("cupy"):
        return
    folders = all((config.invocation_params.dir / arg).is_dir() for arg in config.args)
    cores = len(os.sched_getaffinity(0))
    if folders and cores > 1:
        options.numprocesses, options.dist = min(cores, 4), "worksteal"


def pytest_configure(config: pytest.Config) -> None:
    if "full" in config.option.markexpr.replace("not full", ""):
        os.environ[support.FULL] = "1"
    os.environ.update(mpi_defaults() | launching.SHARED_CORES)
    # There are more processes than cores, so BLAS threads would wait long for each other.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Without .pyc files every process that a test starts would compile all of halox, and every rank all tests.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # Tests on ranks have no examples of Hypothesis, whose import would take time on each rank.
    if running_ranks() is None and importlib.util.find_spec("hypothesis"):
        from hypothesis import HealthCheck, settings

        # No test fails because the machine is slow.
        settings.register_profile(
            "slow", deadline=None, suppress_health_check=[HealthCheck.too_slow]
        )
        settings.load_profile("slow")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest selects tests by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Mark cases that the mark ``part`` leaves to the whole matrix; sort tests that mostly wait first."""
    parts: dict[int, list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("part")
        if mark is not None:
            parts.setdefault(mark.args[0], []).append(item)
    for part, some in parts.items():
        for item in others(some, part):
            item.add_marker(pytest.mark.full)
    yield
    items.sort(key=lambda item: not item.nodeid.startswith(LAUNCHES))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Give the launchers that a test starts a new folder for their session folders.

    Open MPI 5 names a session folder by the process number alone. A launcher that is killed leaves its folder, and one
    that later has the same process number ends with "The PMIx server's listener thread failed to start".
    """
    if running_ranks() is not None:
        return (yield)
    with tempfile.TemporaryDirectory(prefix="halox-test-", ignore_cleanup_errors=True) as folder:
        os.environ[SESSION_FOLDERS] = folder
        return (yield)


def pytest_collection_finish() -> None:
    """Import modules for GPUs, and exclude all modules and tests from later garbage collections, which become faster.

    A module that is first imported while a test has replaced a function would keep the replacement.
    """
    for room in (paths, packing, runtime):
        for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
            importlib.import_module(module.name)
    gc.collect()
    gc.freeze()
