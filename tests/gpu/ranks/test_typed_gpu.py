"""Typed messages on GPU arrays, held against the same exchange of NumPy arrays, which MPI's own is held against."""

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
