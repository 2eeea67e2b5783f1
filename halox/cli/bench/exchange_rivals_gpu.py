"""Halo exchanges of CuPy arrays as careful users write them: one kernel packs, something sends, one kernel unpacks.

Between two ranks all regions of all fields travel as one message. What a rank sends to itself its packing kernel
puts where the unpacking kernel expects it.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from math import gcd
from typing import Any

import numpy as np

from halox.cli.bench.byhand import EACH, THREADS, BoxRow
from halox.cli.bench.exchange_cases import Neighbourhood, Piece
from halox.cli.bench.exchange_rivals import Rival
from halox.cli.bench.kernels import defines, source
from halox.errors import PathError
from halox.runtime.gpu.compiler import OPTIONS, preamble
from halox.runtime.gpu.cuda import cupy, multiprocessors
from halox.runtime.gpu.memory import pinned
from halox.runtime.world import load_mpi

NCCL = "pack + NCCL + unpack"
ZERO_COPY = "zero-copy + mpi4py"
GPU_AWARE = "pack + GPU-aware mpi4py + unpack"

_ALIGNMENT = 16
_TAG = 7


class Segments:
    """Packed bytes of one side, a segment a peer.

    Attributes
    ----------
    nbytes : int
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
    pieces : sequence of Piece
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
        box = piece.box
        inner_first = tuple(zip(box.counts[::-1], box.strides[::-1], strict=True))
        levels = (*inner_first, *((1, 0),) * (3 - len(inner_first)))
        row.array, row.packed = arrays[piece.field] + box.offset, to
        row.count[:] = [count for count, _ in levels]
        row.stride[:] = [stride for _, stride in levels]
        row.words, row.total = box.block_bytes // word, box.nbytes // word
    largest = max(row.total for row in rows)
    return rows, word, -(-largest // (THREADS * EACH))


class Packing:
    """The two kernels of a rank and where they put the bytes.

    Parameters
    ----------
    near : Neighbourhood
    fields : sequence of cupy.ndarray
    bases : (int, int)
        Addresses, on the GPU, of what is sent and of what is received.
    segments : (Segments, Segments)
    device : int
    """

    def __init__(
        self,
        near: Neighbourhood,
        fields: Sequence[Any],
        bases: tuple[int, int],
        segments: tuple[Segments, Segments],
        device: int,
    ) -> None:
        arrays = [int(field.data.ptr) for field in fields]
        places = [
            [base + offset for offset in side.offsets]
            for base, side in zip(bases, segments, strict=True)
        ]
        # Both sides list what goes to this rank itself in the same order.
        own = iter(
            to
            for piece, to in zip(near.receives, places[1], strict=True)
            if piece.peer == near.rank
        )
        targets = [
            next(own) if piece.peer == near.rank else to
            for piece, to in zip(near.sends, places[0], strict=True)
        ]
        self.pack = _launch(near.sends, arrays, targets, 0, device)
        self.unpack = _launch(near.receives, arrays, places[1], 1, device)


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


class _Packed(Rival):
    """Packing into memory of its own; what is between the kernels is the subclass's."""

    def __init__(
        self, comm: Any, near: Neighbourhood, fields: Sequence[Any], device: int, *, host: bool
    ) -> None:
        cp = cupy()
        sides = Segments(near.sends), Segments(near.receives)
        if host:
            buffers = [pinned(side.nbytes) for side in sides]
            bases = buffers[0].device_pointer, buffers[1].device_pointer
            memory: list[Any] = [buffer.array for buffer in buffers]
        else:
            memory = [cp.empty(side.nbytes, np.uint8) for side in sides]
            bases = int(memory[0].data.ptr), int(memory[1].data.ptr)
        self._keep = memory
        self._comm = comm
        self._current_stream = cp.cuda.get_current_stream
        packing = Packing(near, fields, bases, sides, device)
        self._pack, self._unpack = packing.pack, packing.unpack

        def parts(side: int) -> list[tuple[int, Any, int, int]]:
            """Peer, memory, address and length of each segment for another rank."""
            return [
                (peer, memory[side][at : at + n], bases[side] + at, n)
                for peer, (at, n) in sides[side].spans.items()
                if peer != near.rank
            ]

        self._sends, self._receives = parts(0), parts(1)


class _ByMpi(_Packed):
    """Between the kernels: wait for the packing, Irecv and Isend for each peer, Waitall."""

    def __init__(
        self, comm: Any, near: Neighbourhood, fields: Sequence[Any], device: int, *, host: bool
    ) -> None:
        super().__init__(comm, near, fields, device, host=host)
        self._waitall = load_mpi().Request.Waitall

    def __call__(self) -> None:
        """Exchange once."""
        comm = self._comm
        self._pack()
        self._current_stream().synchronize()
        requests = [comm.Irecv(part, peer, _TAG) for peer, part, _, _ in self._receives]
        requests += [comm.Isend(part, peer, _TAG) for peer, part, _, _ in self._sends]
        self._waitall(requests)
        self._unpack()


class ZeroCopy(_ByMpi):
    """The kernels write and read page-locked host memory themselves; MPI moves that."""

    name = ZERO_COPY

    def __init__(self, comm: Any, near: Neighbourhood, fields: Sequence[Any], device: int) -> None:
        super().__init__(comm, near, fields, device, host=True)


class GpuAware(_ByMpi):
    """MPI is given device memory."""

    name = GPU_AWARE

    def __init__(self, comm: Any, near: Neighbourhood, fields: Sequence[Any], device: int) -> None:
        super().__init__(comm, near, fields, device, host=False)


class NcclWire:
    """NCCL through CuPy, between the ranks of a communicator; made by :func:`nccl_between`."""

    def __init__(self, comm: Any) -> None:
        self.nccl: Any = import_module("cupy.cuda.nccl")
        unique = comm.bcast(self.nccl.get_unique_id() if comm.rank == 0 else None)
        self.comm: Any = self.nccl.NcclCommunicator(comm.size, unique, comm.rank)
        # Kept for ever, also by the interpreter as it ends: destroying or aborting waits for every graph that holds a
        # send or receive, and those may live as long.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.comm))


_wires: dict[tuple[int, ...], NcclWire] = {}


def nccl_between(comm: Any, *, shared_gpu: bool) -> NcclWire:
    """Return NCCL between the GPUs that are current on the ranks of a communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    shared_gpu : bool
        Whether two of the ranks use one GPU; the same on all of them.

    Raises
    ------
    PathError
        On all ranks, if there is none.

    Notes
    -----
    Collective. Made once, and there until the process ends.
    """
    whys = comm.allgather(why_no_nccl())
    why = "NCCL refuses ranks that share a GPU" if shared_gpu else max(whys)
    if why:
        raise PathError(why)
    world = load_mpi().COMM_WORLD.group
    ranks = comm.group.Translate_ranks(list(range(comm.size)), world)
    key = (*ranks, cupy().cuda.Device().id)
    if key not in _wires:
        _wires[key] = NcclWire(comm)
    return _wires[key]


class WithNccl(_Packed):
    """Everything on the stream; sends and receives in one NCCL group."""

    name = NCCL
    capturable = True

    def __init__(
        self, wire: NcclWire, comm: Any, near: Neighbourhood, fields: Sequence[Any], device: int
    ) -> None:
        super().__init__(comm, near, fields, device, host=False)
        self._wire, self._byte = wire, wire.nccl.NCCL_UINT8

    def __call__(self) -> None:
        """Exchange once."""
        nccl, comm, byte = self._wire.nccl, self._wire.comm, self._byte
        self._pack()
        if self._sends:
            stream = self._current_stream().ptr
            nccl.groupStart()
            for peer, _, address, nbytes in self._sends:
                comm.send(address, nbytes, byte, peer, stream)
            for peer, _, address, nbytes in self._receives:
                comm.recv(address, nbytes, byte, peer, stream)
            nccl.groupEnd()
        self._unpack()


def why_no_nccl() -> str:
    """Return why CuPy's NCCL cannot be used in this process, or an empty text."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nccl: Any = import_module("cupy.cuda.nccl")
    except Exception as error:
        return f"CuPy has no NCCL here ({error})"
    return "" if getattr(nccl, "available", True) else "CuPy finds no NCCL library"
