"""Plugin of pytest for tests on several ranks: ``mpiexec -n 4 python -m pytest -p halox.testing``.

After each phase of a test the ranks compare its outcome, so that all continue with the same test. The plugin sets the
default of HALOX_TIMEOUT to 20. On one rank it does nothing else.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from halox.errors import ExchangeTimeoutError
from halox.runtime.status import ranks_text
from halox.runtime.uncaught import FORWARDING_S
from halox.runtime.world import World, fail_all, load_mpi

_PATIENCE_S = (
    1.0  # then a rank with a failed test disables the calls in which other ranks may wait for it
)
_NAP_S = 0.0001
_FAILED, _WAITED, _XFAILED, _SKIPPED, _PASSED = range(5)
_KINDS: tuple[Any, ...] = (
    pytest.fail.Exception,
    ExchangeTimeoutError,
    pytest.xfail.Exception,
    pytest.skip.Exception,
)
"""Exceptions of the outcomes. Where ranks differ, the first outcome counts on all ranks."""


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Let only rank 0 write a file of results; the other ranks have other temporary folders."""
    comm = load_mpi().COMM_WORLD
    if comm.size > 1 and config.getoption("numprocesses", None):
        raise pytest.UsageError("pytest-xdist (-n) cannot run tests on several ranks; use -n 0")
    if comm.rank:
        config.option.xmlpath, config.option.setupshow = None, False
        if folder := config.getoption("basetemp", None):
            config.option.basetemp = f"{folder}-{comm.rank}"


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the hooks for several ranks; only rank 0 prints reports."""
    os.environ.setdefault("HALOX_TIMEOUT", "20")
    comm = load_mpi().COMM_WORLD
    if comm.size > 1:
        config.pluginmanager.register(_Ranks(comm.Dup()), "halox-ranks")
        if comm.rank:
            config.pluginmanager.unregister(name="terminalreporter")


class _Ranks:
    """Hooks of one rank; ``comm`` is for the plugin alone."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._world = World()  # uses the same communicator as grids of COMM_WORLD
        self._errors: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._errors.append(report.longreprtext)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        mine = [item.nodeid for item in session.items], "".join(self._errors)
        every = self._gather(mine, "collection", "".join(self._errors))
        for rank, (names, errors) in enumerate(every):
            if names != every[0][0] or bool(errors) != bool(every[0][1]):
                only = sorted({*names} ^ {*every[0][0]}) or ["the order differs"]
                raise pytest.UsageError(
                    f"ranks 0 and {rank} have collected different tests: {', '.join(only[:5])}\n{errors or every[0][1]}"
                )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        # pytest takes the exception of a method of `unittest` from the item.
        kept = getattr(item, "_excinfo", None)
        found = kept[0] if kept else call.excinfo
        kinds = [n for n, kind in enumerate(_KINDS[1:], 1) if found and found.errisinstance(kind)]
        mine = kinds[0] if kinds else _FAILED if found else _PASSED
        text = ""
        if found is not None:
            text = str(found.value) if mine > _WAITED else found.exconly().partition("\n")[0]
            text += f"\n{item.repr_failure(found)}" * (mine <= _WAITED)
        every = self._gather(
            (mine, text), f"{call.when} of {item.nodeid}", text * (mine == _FAILED)
        )
        outcome = min(number for number, _ in every)
        word = ("failed", "failed", "xfailed", "skipped", "")[outcome]
        texts = [(f"{word} on rank {r}", text) for r, (n, text) in enumerate(every) if n == outcome]
        if mine > outcome:
            if kept:
                kept.clear()
            kind: Any = pytest.fail.Exception if outcome == _WAITED else _KINDS[outcome]
            with pytest.raises(kind) as call.excinfo:
                raise kind("\n".join(map(": ".join, texts)), pytrace=False)
        if outcome <= _WAITED:
            self._get_in_step()
        report = yield
        if outcome == _FAILED:
            # The marks `xfail` of a failed rank decide.
            mark = getattr(report, "wasxfail", "")
            marks = self._comm.allgather((report.outcome, mark) if mine == outcome else None)
            report.outcome, mark = min(entry for entry in marks if entry)
            report.__dict__.pop("wasxfail", None)
            if report.outcome == "skipped":
                report.wasxfail = mark
        if mine == outcome <= _WAITED:
            report.sections += [entry for entry in texts if entry[1] != text]
        return report

    def pytest_unconfigure(self) -> None:
        """Wait until rank 0 has printed: under ``python -m mpi4py`` a rank that ends with a failure ends all ranks."""
        sys.stdout.flush()
        while True:
            with suppress(pytest.exit.Exception):  # the other ranks are still in a test
                self._gather(None, "session", "")
                break
        time.sleep(FORWARDING_S)

    def _get_in_step(self) -> None:
        """Disable all grids if ranks have made different calls; new grids work. Collective."""
        watch = self._world.ranks.watch
        states = self._comm.allgather((watch.number, bool(watch.failed)))
        if states != [(watch.number, False)] * len(states):
            fail_all(RuntimeError("an earlier test has failed"))
            self._world = World()

    def _gather(self, mine: Any, what: str, failure: str) -> list[Any]:
        """Return the objects of all ranks; end all ranks if a rank does not come. ``failure`` is an error's text."""
        comm, limit_s, start = self._comm, self._world.limit_s, time.monotonic()
        # One broadcast from each rank: the broadcast of a missing rank stays incomplete.
        buffers = np.zeros((comm.size, 1), np.uint8)
        requests = [comm.Ibcast(buffer, rank) for rank, buffer in enumerate(buffers)]
        is_disabled = not failure
        while missing := [rank for rank, request in enumerate(requests) if not request.Test()]:
            time.sleep(_NAP_S)
            waited_s = time.monotonic() - start
            if waited_s > _PATIENCE_S and not is_disabled:
                fail_all(RuntimeError(f"{what} has failed"))
                is_disabled = True
            if waited_s > 2 * limit_s > 0:  # the missing ranks have no time-out of halox
                print(
                    f"{failure}\nhalox.testing: rank {comm.rank} has waited for {waited_s:.0f} s for "
                    f"{ranks_text(missing)} after {what}; all ranks end (HALOX_TIMEOUT={limit_s:g})",
                    file=sys.stderr,
                    flush=True,
                )
                comm.Abort(1)
        every = comm.allgather((what, mine))
        for rank, (other, _) in enumerate(every):
            if other != every[0][0]:
                pytest.exit(f"rank 0 has ended the {every[0][0]}, and rank {rank} the {other}", 1)
        return [entry for _, entry in every]
