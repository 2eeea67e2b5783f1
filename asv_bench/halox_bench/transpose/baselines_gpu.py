"""Transposes of CuPy arrays as careful users write them: copies, cuTENSOR, and NCCL between ranks."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from halox.errors import PathError
from halox.runtime.gpu.cuda import cupy
from halox_bench.ranks.nccl import Nccl, exchange
from halox_bench.transpose.baselines import COPY, Arrays, Turning, turned
from halox_bench.transpose.cases import TransposeCase
from halox_bench.transpose.pieces import Pieces

CUPY = "CuPy's strided copy"
CUTENSOR = "cuTENSOR"
NCCL = "pack + NCCL + unpack"


class DeviceCopy(Turning):
    """``cudaMemcpyAsync`` of the source's bytes on the device."""

    name = COPY
    capturable = True

    def __init__(self, arrays: Arrays) -> None:
        cp = cupy()
        super().__init__([arrays[0], cp.empty_like(arrays[0])])
        origin, target = (int(array.data.ptr) for array in self.arrays)
        runtime = cp.cuda.runtime
        self._copy, self._current_stream = runtime.memcpyAsync, cp.cuda.get_current_stream
        self._what = target, origin, self.arrays[0].nbytes, runtime.memcpyDeviceToDevice

    def __call__(self) -> None:
        self._copy(*self._what, self._current_stream().ptr)


class StridedCopy(Turning):
    """``target[...] = source.transpose(axes)``."""

    name = CUPY
    capturable = True

    def __init__(self, case: TransposeCase, arrays: Arrays) -> None:
        super().__init__(arrays)
        self._view = turned(arrays[0], case)

    def __call__(self) -> None:
        self.arrays[1][...] = self._view


class Cutensor(Turning):
    """cuTENSOR through CuPy: target = 1 x the source with its axes turned + 0 x the target.

    Raises
    ------
    PathError
        If CuPy finds no cuTENSOR, or cuTENSOR lacks the dtype.
    """

    name = CUTENSOR
    capturable = True

    def __init__(self, case: TransposeCase, arrays: Arrays) -> None:
        super().__init__(arrays)
        try:
            library: Any = import_module("cupyx.cutensor")
        except Exception as error:
            raise PathError(f"CuPy has no cuTENSOR here ({error})") from error
        if np.dtype(case.dtype).char not in "efdFD":
            raise PathError(f"cuTENSOR has no elements of dtype {case.dtype}")
        self._combine = library.elementwise_binary
        of_source = tuple(range(case.ndim + len(case.components)))
        of_target = (*case.source_axes, *of_source[case.ndim :])
        self._modes = of_source, of_target
        try:
            self()  # makes and keeps cuTENSOR's plan
        except Exception as error:
            raise PathError(f"cuTENSOR does not take it ({error})") from error

    def __call__(self) -> None:
        source, target = self.arrays
        of_source, of_target = self._modes
        self._combine(1.0, source, of_source, 0.0, target, of_target, target)


class ByNccl(Turning):
    """CuPy's strided copies of the peers' cells, turned, into buffers; one NCCL group; strided copies out of buffers.

    Cells that stay on the rank are copied directly to their places.
    """

    name = NCCL
    capturable = True

    def __init__(self, wire: Nccl, case: TransposeCase, pieces: Pieces, arrays: Arrays) -> None:
        super().__init__(arrays)
        cp = cupy()
        source, target = arrays
        self._wire, self._current_stream = wire, cp.cuda.get_current_stream
        self._packs: list[tuple[Any, Any]] = []
        self._unpacks: list[tuple[Any, Any]] = []
        self._sends: list[tuple[int, int, int]] = []
        self._receives: list[tuple[int, int, int]] = []
        own = {piece.peer: target[piece.box] for piece in pieces.receives}
        for piece in pieces.sends:
            view = turned(source[piece.box], case)
            if piece.peer == pieces.rank:
                self._packs.append((own[piece.peer], view))
                continue
            buffer = cp.empty(view.shape, case.dtype)
            self._packs.append((buffer, view))
            self._sends.append((piece.peer, int(buffer.data.ptr), buffer.nbytes))
        for piece in pieces.receives:
            if piece.peer != pieces.rank:
                place = own[piece.peer]
                buffer = cp.empty(place.shape, case.dtype)
                self._unpacks.append((place, buffer))
                self._receives.append((piece.peer, int(buffer.data.ptr), buffer.nbytes))

    def __call__(self) -> None:
        for target, view in self._packs:
            target[...] = view
        exchange(self._wire, self._sends, self._receives, self._current_stream().ptr)
        for target, buffer in self._unpacks:
            target[...] = buffer
