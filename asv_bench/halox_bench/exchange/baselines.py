"""Halo exchanges of NumPy arrays as users write them with mpi4py, which need no library beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from halox.runtime.world import load_mpi
from halox_bench.exchange.cases import Neighbourhood, Piece
from halox_bench.ranks.methods import Baseline

MPI_TYPES = "mpi4py types, Isend/Irecv"
MPI_NEIGHBOUR = "mpi4py types, Neighbor_alltoallw"


def subarrays(near: Neighbourhood, pieces: Sequence[Piece]) -> list[Any]:
    """Return a committed MPI subarray type for each region."""
    from mpi4py.util.dtlib import from_numpy_dtype

    case = near.case
    element = from_numpy_dtype(np.dtype(case.dtype))
    return [
        element.Create_subarray(
            case.padded_shape,
            (*piece.extents, *case.components),
            (*piece.starts, *(0 for _ in case.components)),
        ).Commit()
        for piece in pieces
    ]


class MpiTypes(Baseline):
    """A subarray type, an Isend and an Irecv for each region; Waitall."""

    name = MPI_TYPES

    def __init__(self, comm: Any, near: Neighbourhood, fields: Sequence[Any]) -> None:
        self._waitall = load_mpi().Request.Waitall
        self._types = subarrays(near, (*near.sends, *near.receives))
        many = near.case.fields

        def posts(post: Any, pieces: Sequence[Piece], types: Sequence[Any]) -> list[Any]:
            return [
                (post, [fields[p.field], 1, datatype], p.peer, p.tag * many + p.field)
                for p, datatype in zip(pieces, types, strict=True)
            ]

        n = len(near.sends)
        self._posts = posts(comm.Irecv, near.receives, self._types[n:])
        self._posts += posts(comm.Isend, near.sends, self._types[:n])

    def __call__(self) -> None:
        self._waitall([post(buffer, peer, tag) for post, buffer, peer, tag in self._posts])

    def close(self) -> None:
        for datatype in self._types:
            datatype.Free()


class MpiNeighbour(Baseline):
    """The same types in one Neighbor_alltoallw on a graph of the neighbours."""

    name = MPI_NEIGHBOUR

    def __init__(self, comm: Any, near: Neighbourhood, fields: Sequence[Any]) -> None:
        # Where the same two ranks meet several times, the first edge of the one is the first of
        # the other: both lists are in the order of the sender's directions.
        self._graph = comm.Create_dist_graph_adjacent(
            [piece.peer for piece in near.receives], [piece.peer for piece in near.sends]
        )
        self._types = subarrays(near, (*near.sends, *near.receives))
        n, bottom = len(near.sends), load_mpi().BOTTOM

        def message(pieces: Sequence[Piece], types: list[Any]) -> list[Any]:
            places = [fields[piece.field].ctypes.data for piece in pieces]
            return [bottom, [1] * len(pieces), places, types]

        self._send = message(near.sends, self._types[:n])
        self._receive = message(near.receives, self._types[n:])

    def __call__(self) -> None:
        self._graph.Neighbor_alltoallw(self._send, self._receive)

    def close(self) -> None:
        for datatype in self._types:
            datatype.Free()
        self._graph.Free()
