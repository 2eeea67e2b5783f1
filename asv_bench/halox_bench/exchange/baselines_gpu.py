"""Halo exchanges of CuPy arrays as careful users write them: one kernel packs, one message a peer, one kernel unpacks.

Between two ranks all regions of all fields travel as one message. For messages of a rank to itself the packing kernel
writes into the unpacking kernel's buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from typing import Any

import numpy as np

from halox.runtime.gpu.compiler import OPTIONS, preamble
from halox.runtime.gpu.cuda import cupy, multiprocessors
from halox.runtime.world import load_mpi
from halox_bench.common.byhand import EACH, THREADS, BoxRow, packed_buffer
from halox_bench.common.kernels import defines, source
from halox_bench.exchange.cases import Neighbourhood, Piece
from halox_bench.ranks.methods import Baseline
from halox_bench.ranks.nccl import Nccl, exchange

NCCL = "pack + NCCL + unpack"
ZERO_COPY = "zero-copy + mpi4py"
GPU_AWARE = "pack + GPU-aware mpi4py + unpack"

_ALIGNMENT = 16
_TAG = 7


class Segments:
    """Packed bytes of one side, a segment a peer.

    Attributes
    ----------
    offsets : list of int
        Of each piece.
    spans : dict
        For each peer its segment's first byte and length.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.offsets: list[int] = []
        self.spans: dict[int, tuple[int, int]] = {}
        end = 0
        for piece in pieces:
            self.offsets.append(end)
            begin = self.spans.get(piece.peer, (end, 0))[0]
            end += -(-piece.box.nbytes // _ALIGNMENT) * _ALIGNMENT
            self.spans[piece.peer] = (begin, end - begin)
        self.nbytes = end


def table(
    pieces: Sequence[Piece], arrays: Sequence[int], packed: Sequence[int]
) -> tuple[Any, int, int]:
    """Lay out the table of the kernel ``faces``.

    Parameters
    ----------
    arrays : sequence of int
        Address of each field.
    packed : sequence of int
        Address of each piece's packed bytes, a multiple of 16.

    Returns
    -------
    rows : ctypes array
    word : int
        Bytes of the widest word that everything can be moved in.
    each : int
        Thread blocks for each row, as many as the largest needs.
    """
    word = gcd(16, *(piece.box.word() for piece in pieces), *arrays)
    rows = (BoxRow * len(pieces))()
    for row, piece, to in zip(rows, pieces, packed, strict=True):
        row.fill(piece.box, arrays[piece.field], to, word)
    largest = max(row.total for row in rows)
    return rows, word, -(-largest // (THREADS * EACH))


def _launch(
    pieces: Sequence[Piece], arrays: Sequence[int], packed: Sequence[int], unpack: int, device: int
) -> Callable[[], None]:
    """Return a launch on CuPy's current stream, as users make it: through a CuPy kernel."""
    cp = cupy()
    rows, word, each = table(pieces, arrays, packed)
    each = max(1, min(each, 8 * multiprocessors(device)))
    on_device = cp.asarray(np.frombuffer(bytearray(rows), np.uint8))
    settings = defines("byhand", WORD_BYTES=word, UNPACK=unpack, THREADS=THREADS)
    module = cp.RawModule(code=preamble(settings) + source("byhand"), options=OPTIONS)
    kernel, shape = module.get_function("faces"), ((len(pieces) * each,), (THREADS,))
    arguments = (on_device, np.uint32(each))
    return lambda: kernel(*shape, arguments)


class _Packed(Baseline):
    """Packing and unpacking kernels with their buffers; a subclass sends the packed bytes."""

    def __init__(
        self, comm: Any, near: Neighbourhood, fields: Sequence[Any], device: int, *, host: bool
    ) -> None:
        sides = Segments(near.sends), Segments(near.receives)
        buffers = [packed_buffer(side.nbytes, host=host) for side in sides]
        memory, bases, self._keep = zip(*buffers, strict=True)
        self._comm = comm
        self._current_stream = cupy().cuda.get_current_stream
        arrays = [int(field.data.ptr) for field in fields]
        places = [
            [base + offset for offset in side.offsets]
            for base, side in zip(bases, sides, strict=True)
        ]
        # Both sides list messages of this rank to itself in the same order.
        own = iter(
            to
            for piece, to in zip(near.receives, places[1], strict=True)
            if piece.peer == near.rank
        )
        targets = [
            next(own) if piece.peer == near.rank else to
            for piece, to in zip(near.sends, places[0], strict=True)
        ]
        self._pack = _launch(near.sends, arrays, targets, 0, device)
        self._unpack = _launch(near.receives, arrays, places[1], 1, device)

        def parts(side: int) -> list[tuple[int, Any, int, int]]:
            """Peer, memory, address and length of each segment for another rank."""
            return [
                (peer, memory[side][at : at + n], bases[side] + at, n)
                for peer, (at, n) in sides[side].spans.items()
                if peer != near.rank
            ]

        self._sends, self._receives = parts(0), parts(1)


class ByMpi(_Packed):
    """Between the kernels: wait for the packing, Irecv and Isend for each peer, Waitall.

    MPI moves page-locked host memory, which the kernels write and read themselves, or device memory.
    """

    def __init__(
        self, comm: Any, near: Neighbourhood, fields: Sequence[Any], device: int, *, host: bool
    ) -> None:
        super().__init__(comm, near, fields, device, host=host)
        self._waitall = load_mpi().Request.Waitall

    def __call__(self) -> None:
        comm = self._comm
        self._pack()
        self._current_stream().synchronize()
        requests = [comm.Irecv(part, peer, _TAG) for peer, part, _, _ in self._receives]
        requests += [comm.Isend(part, peer, _TAG) for peer, part, _, _ in self._sends]
        self._waitall(requests)
        self._unpack()


class ByNccl(_Packed):
    """Everything on the stream; sends and receives in one NCCL group."""

    name = NCCL
    capturable = True

    def __init__(
        self, wire: Nccl, comm: Any, near: Neighbourhood, fields: Sequence[Any], device: int
    ) -> None:
        super().__init__(comm, near, fields, device, host=False)
        self._wire = wire
        self._out, self._into = (
            [(peer, address, nbytes) for peer, _, address, nbytes in parts]
            for parts in (self._sends, self._receives)
        )

    def __call__(self) -> None:
        self._pack()
        exchange(self._wire, self._out, self._into, self._current_stream().ptr)
        self._unpack()
