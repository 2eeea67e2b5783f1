"""Typed messages of GPU arrays, compared with NumPy arrays, which tests/mpi/test_typed.py compares with MPI."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from halox import Exchange, Recv, Send
from tests.mpi.test_typed import TYPES
from tests.support import require

require("gpu")

import cupy  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("receiver", TYPES)
@pytest.mark.parametrize("sender", TYPES)
def test_round_a_ring(sender: str, receiver: str, comm: MPI.Intracomm) -> None:
    low, high = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    source = np.arange(130.0) + 1000 * comm.rank
    found = []
    for xp in (np, cupy):
        a, b = xp.asarray(source), xp.full(130, -1.0)
        sends, receives = [Send(a, TYPES[sender], high)], [Recv(b, TYPES[receiver], low)]
        with Exchange(sends, receives, comm=comm) as exchange:
            for _ in range(3):
                exchange()
            comm.Barrier()
        found.append(b if xp is np else b.get())
    assert np.array_equal(*found) and found[0].max() >= 1000 * low


def test_a_type_that_reaches_outside_is_refused(comm: MPI.Intracomm) -> None:
    from halox import datatypes
    from halox.errors import FieldError

    a = cupy.zeros(4)
    wide = datatypes.contiguous(1 << 30, "f8")
    with pytest.raises(FieldError, match="bytes"):
        Exchange([Send(a, wide, comm.rank)], [Recv(a, wide, comm.rank)], comm=comm)


@pytest.mark.parametrize("node", ["", "rank"])
def test_between_host_and_gpu(
    node: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ring in which even ranks have NumPy arrays and odd ranks CuPy arrays."""
    monkeypatch.setenv("HALOX_NODE", node)
    low, high = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    xp = cupy if comm.rank % 2 else np
    source, target = xp.zeros(130), xp.full(130, -1.0)
    sends, receives = [Send(source, TYPES["vector"], high)], [Recv(target, TYPES["columns"], low)]
    wanted = np.full(130, -1.0)
    with Exchange(sends, receives, comm=comm) as exchange:
        for step in range(5):
            source[...] = xp.arange(130.0) + 1000 * comm.rank + 1e6 * step
            exchange()
            theirs = np.arange(130.0) + 1000 * low + 1e6 * step
            rows = [theirs[5 * k : 5 * k + 3] for k in range(8)]
            column = np.concatenate(rows).reshape(4, 6)
            for k in range(4):
                wanted[k : k + 48 : 8] = column[k]
            found = target if xp is np else target.get()
            assert np.array_equal(found, wanted)
