"""Stand-ins for communicators on a single process: MPI's with absent peers, and NCCL's with one rank."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from halox.runtime import nccl_ranks


def alone(size: int) -> Any:
    """Return rank 0's communicator of ``size`` ranks; the other ranks do not exist and agree with rank 0."""
    from mpi4py import MPI

    return SimpleNamespace(
        size=size,
        rank=0,
        bcast=lambda value: value,
        allgather=lambda value: [value],
        Barrier=MPI.COMM_SELF.Barrier,
    )


def nccl_of_one(
    monkeypatch: pytest.MonkeyPatch,
    failure: Callable[[int], str] = lambda comm: "",
    abort: Callable[[int], object] = lambda comm: None,
) -> nccl_ranks.NcclRanks:
    """Return an NCCL communicator of one rank, without NCCL; ``failure`` and ``abort`` replace the library's calls."""
    library = SimpleNamespace(
        unique_id=lambda: b"", make=lambda size, unique_id, rank: 1, failure=failure, abort=abort
    )
    monkeypatch.setattr(nccl_ranks, "load_nccl", lambda: library)
    monkeypatch.setattr(nccl_ranks, "before_finalize", lambda mpi, call: None)
    monkeypatch.setattr(nccl_ranks, "_within_limit", lambda world, device, work, waits: work())
    world: Any = SimpleNamespace(
        rank=0,
        size=1,
        mpi=None,
        from_first=lambda build, step: build(),
        attempt=lambda build, step: build(),
    )
    return nccl_ranks.NcclRanks(world, 0)
