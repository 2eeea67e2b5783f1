"""What all tests have in common: the selection, quick starts of processes, and commands that run beside the tests."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests import support
from tests.beside import Beside

BESIDE = Beside()


def pytest_configure(config: pytest.Config) -> None:
    if "full" in config.option.markexpr.replace("not full", ""):
        os.environ[support.FULL] = "1"
    # The processes that tests start would compile all of halox, and ranks all tests, each for itself.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("beside") is not None)


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly:
        return
    for item in session.items:
        mark = item.get_closest_marker("beside")
        if mark is not None:
            params = item.callspec.params if hasattr(item, "callspec") else {}
            BESIDE.add(item.nodeid, partial(mark.kwargs["call"], **params))


def pytest_sessionfinish() -> None:
    BESIDE.stop()


@pytest.fixture
def beside(request: pytest.FixtureRequest) -> Iterator[Any]:
    """What the call of the test's mark ``beside`` returned; it has been running since the first test."""
    # The time limit of a test is for one test; there may be hundreds in the call, which has its own.
    faulthandler.cancel_dump_traceback_later()
    yield BESIDE.result(request.node.nodeid)
