"""Halo exchanges of NumPy arrays as users write them with mpi4py alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from halox.runtime.world import load_mpi
from halox_bench.exchange.cases import Neighbourhood, Piece
from halox_bench.ranks.methods import Baseline

BY_HAND = "packed by hand, Isend/Irecv"
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


class ByHand(Baseline):
    """Axis by axis, so that corners are right: copies along an axis of one rank, messages of packed faces along others.

    Slices, buffers and views are made once. Both faces of an axis travel at the same time; without corners the faces of
    all axes do.
    """

    name = BY_HAND

    def __init__(self, comm: Any, near: Neighbourhood, fields: Sequence[Any]) -> None:
        self._comm, self._waitall = comm, load_mpi().Request.Waitall
        case = near.case
        peers = {piece.tag: piece.peer for piece in near.sends}
        # Each stage: slices to copy, and packed faces: buffers, peers and tags of both directions.
        self._stages: list[tuple[list[_Copy], list[_Message], list[_Message]]] = []
        for axis in case.along:
            if case.corners or not self._stages:
                self._stages.append(([], [], []))
            copies, sends, receives = self._stages[-1]
            for side in (-1, 1):
                target = _face(near, axis, -side, received=True)
                source = _face(near, axis, side, received=False)
                if near.proc_shape[axis] == 1:
                    copies += [(field, target, source) for field in fields]
                    continue
                tags = [_tag(near, axis, way) for way in (side, -side)]
                for faces, index, peer in (
                    (sends, source, peers[tags[0]]),
                    (receives, target, peers[tags[1]]),
                ):
                    views = [field[index] for field in fields]
                    buffer = np.empty((len(views), *views[0].shape), case.dtype)
                    faces.append((buffer, peer, tags[0], [*zip(buffer, views, strict=True)]))

    def __call__(self) -> None:
        comm = self._comm
        for copies, sends, receives in self._stages:
            for field, target, source in copies:
                field[target] = field[source]
            if not sends:
                continue
            requests = [comm.Irecv(buffer, peer, tag) for buffer, peer, tag, _ in receives]
            for buffer, peer, tag, views in sends:
                for packed, face in views:
                    packed[...] = face
                requests.append(comm.Isend(buffer, peer, tag))
            self._waitall(requests)
            for _, _, _, views in receives:
                for packed, face in views:
                    face[...] = packed


_Index = tuple[slice, ...]
_Copy = tuple[Any, _Index, _Index]
_Message = tuple[Any, int, int, list[tuple[Any, Any]]]


def _tag(near: Neighbourhood, axis: int, side: int) -> int:
    return near.case.directions.index(tuple(side * (n == axis) for n in range(near.case.ndim)))


def _face(near: Neighbourhood, axis: int, side: int, *, received: bool) -> _Index:
    """Return the index of a face; with corners it covers the halos of all other axes."""
    case = near.case
    direction = [side * (n == axis) for n in range(case.ndim)]
    starts, extents = case.region(direction, received=received)
    return tuple(
        slice(None) if case.corners and n != axis else slice(start, start + extent)
        for n, (start, extent) in enumerate(zip(starts, extents, strict=True))
    )


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
        # Two ranks may share several edges: both list them in the order of the sender's directions.
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
