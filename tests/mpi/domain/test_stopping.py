"""`halox.stopping`: one answer on all ranks, after a signal to one of them and near a wall-time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest
from mpi4py import MPI

import halox
from halox.domain import stopping
from halox.errors import HaloxError, StateError
from tests.mpi.bad_input import odd_on, raised_by_all
from tests.support import ROOT

pytestmark = pytest.mark.usually(1, 3)


@pytest.fixture(autouse=True)
def as_at_the_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("HALOX_WALL_TIME", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)
    # An earlier call in this process, as in an example, has left its handler.
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    stopping.sigterm.is_installed = stopping.sigterm.received = False
    yield
    stopping.sigterm.is_installed = stopping.sigterm.received = False
    signal.signal(signal.SIGTERM, before)


def test_a_signal_to_one_rank(comm: MPI.Intracomm) -> None:
    before = signal.getsignal(signal.SIGTERM)
    for _ in range(2):
        assert halox.stopping() is False
    comm.Barrier()
    if comm.rank == comm.size - 1:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == before  # a second signal ends the process
    assert halox.stopping() is True and halox.stopping() is True


def test_a_handler_of_the_program_is_called(comm: MPI.Intracomm) -> None:
    called = []
    signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
    assert halox.stopping() is False
    os.kill(os.getpid(), signal.SIGTERM)
    assert halox.stopping() is True and called == [signal.SIGTERM]


def test_only_the_ranks_of_a_grid(comm: MPI.Intracomm) -> None:
    half = comm.Split(comm.rank % 2)
    with halox.Grid((8 * half.size, 4), comm=half, device="cpu") as grid:
        assert halox.stopping(grid) is False
        assert halox.stopping(grid, limit_s=0 if comm.rank % 2 else 1e9) is bool(comm.rank % 2)
    half.Free()


def test_near_a_limit(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of one rank holds for all; seconds count from the start of the process."""
    assert not halox.stopping(limit_s=1e6)
    assert halox.stopping(limit_s=1e6, before_s=1e6)
    assert halox.stopping(limit_s=1 if comm.rank == comm.size - 1 else 1e6)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 500))
    assert not halox.stopping() and halox.stopping(before_s=600)
    monkeypatch.setenv("HALOX_WALL_TIME", "1e6")
    assert not halox.stopping(before_s=600)
    monkeypatch.setenv("HALOX_WALL_TIME", "5")
    assert halox.stopping() and not halox.stopping(limit_s=1e6)


@pytest.mark.usually(1)
@pytest.mark.usually(1)
def test_the_start_of_the_process() -> None:
    program = (
        "import time; began = time.time(); from halox.domain.stopping import _started; "
        "print(began - _started())"
    )
    began = time.time()
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert -0.1 < float(run.stdout) < time.time() - began


@pytest.mark.parametrize(
    ("word", "call"),
    [
        ("limit_s", lambda odd: halox.stopping(limit_s=odd("1h", 10))),
        ("limit_s", lambda odd: halox.stopping(limit_s=10**400)),
        ("before_s", lambda odd: halox.stopping(before_s="1m")),
        ("grid", lambda odd: halox.stopping(3600)),
    ],
)
def test_bad_input(word: str, call: Any, comm: MPI.Intracomm) -> None:
    raised_by_all(comm, HaloxError, word, lambda: call(odd_on(comm)))


def test_bad_input_of_the_environment(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALOX_WALL_TIME", "2:00:00")
    raised_by_all(comm, HaloxError, "HALOX_WALL_TIME", halox.stopping)
    monkeypatch.delenv("HALOX_WALL_TIME")
    assert halox.stopping() is False


def test_first_in_another_thread(comm: MPI.Intracomm) -> None:
    found: list[Any] = []

    def call() -> None:
        try:
            halox.stopping()
        except StateError as error:
            found.append(str(error))

    thread = Thread(target=call)
    thread.start()
    thread.join()
    assert len(found) == 1 and "main thread" in found[0]
