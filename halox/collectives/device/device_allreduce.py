"""An allreduce of arrays of one shape on GPUs: what may be given, and where results go."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np

from halox.collectives.device.device_algorithms import ByKernel, make_algorithm
from halox.errors import DeviceError, FieldError, StateError
from halox.runtime.array_cache import Seen
from halox.runtime.arrays import Described, as_ndarray, describe, scalar_array
from halox.runtime.context import Context
from halox.runtime.gpu.capture import is_capturing
from halox.runtime.gpu.cuda import cupy, is_cupy_array, is_device_array
from halox.runtime.gpu.devices import as_device_array


class DeviceAllreduce:
    """Combines arrays of one shape and dtype on the GPUs of all ranks; collective to make.

    Parameters
    ----------
    ground : Context
        The ranks.
    device : int
        This rank's GPU.
    shape, dtype, op
        The same on all ranks; the operation has a meaning for the dtype.
    algorithm : str, optional
        By default the one that is expected to be fastest.

    Attributes
    ----------
    algorithm : str
    reasons : dict
        Why others cannot be had.
    captures : bool
        Whether a call may be captured in a CUDA graph.
    seen : Seen
        Launches by array and ``out``, of calls that are no more than that; without ``out`` they return a new array.

    Raises
    ------
    FieldError
        If the algorithm cannot be had.
    StateError
        If the current stream is being captured.
    """

    def __init__(
        self,
        ground: Context,
        device: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        op: str,
        algorithm: str | None = None,
    ) -> None:
        self._ground, self._device = ground, device
        self.shape, self.dtype, self.op = shape, dtype, op
        what = op, dtype, prod(shape)
        self._do, self.algorithm, self.reasons = make_algorithm(ground, device, what, algorithm)
        self.captures = self._do.captures
        self._nbytes = prod(shape) * dtype.itemsize
        self._part = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
        self.seen: Seen[Callable[[], Any]] = Seen()
        self._empty = cupy().empty
        self._current_stream = cupy().cuda.get_current_stream

    def __call__(self, array: Any, out: Any = None) -> Any:
        """Combine the ranks' arrays.

        Parameters
        ----------
        array : array or scalar
            On this rank's GPU, or on the host.
        out : array, optional
            Likewise; may be ``array`` itself, or overlap it.

        Returns
        -------
        array
            ``out``, or a new array: of CuPy for one on the GPU, of NumPy for one on the host, a NumPy scalar for a
            scalar.
        """
        stream = self._current_stream()
        error: Exception | None = None
        source = target = None
        try:
            if not self.captures and is_capturing(stream):
                raise StateError(
                    f"the {self.algorithm!r} algorithm needs the host in every call and cannot be captured in a CUDA "
                    "graph; 'oneshot' and 'reduce_scatter_allgather' can, where every rank has a GPU of its own"
                )
            source = self._source(array)
            target = self._target(source, out)
        except Exception as caught:
            error = caught
        if error is not None:
            self.refuse(error)
        assert source is not None and target is not None
        self._do.reduce(source.data.ptr, target.data.ptr, stream, None)
        if isinstance(self._do, ByKernel) and source is array:
            if target is out:
                self.seen.keep("", (array, out), self._do.bound(source.data.ptr, target.data.ptr))
            elif out is None and self.seen.again((array,)):
                new = partial(self._empty, self.shape, self.dtype)
                self.seen.keep("", (array, None), self._do.bound(source.data.ptr, new))
        if out is None:
            if is_device_array(array):
                return target
            found = target.get()
            return found[()] if np.isscalar(array) else found
        if target is not out:
            _write(out, target)
        return out

    def refuse(self, error: Exception) -> None:
        """Raise this rank's reason not to take part in a call, on the other ranks too."""
        self._do.reduce(0, 0, self._current_stream(), error)

    def close(self) -> None:
        """Give back what it holds; collective."""
        self.seen.clear()
        self._do.close()

    def _source(self, array: Any) -> Any:
        """Return a rank's values as a contiguous run on the GPU."""
        given = scalar_array(array, self.dtype) if np.isscalar(array) else array
        found = describe(given, "array")
        self._check(found, "array")
        given = as_device_array(_host(given) if found.device is None else given)
        return self._plain(given)

    def _plain(self, array: Any) -> Any:
        is_run, is_aligned = array.flags.c_contiguous, array.data.ptr % self._part == 0
        if is_run and is_aligned:
            return array
        if is_aligned:
            return array.copy(order="C")
        if not is_run:
            raise FieldError(
                f"array: its address is no multiple of {self._part} bytes, and it is no contiguous run either; copy it "
                "first"
            )
        found = self._empty(self.shape, self.dtype)
        found.data.copy_from_device_async(array.data, self._nbytes)
        return found

    def _target(self, source: Any, out: Any) -> Any:
        """Return where the result is formed: ``out`` itself, where that is as good."""
        if out is None:
            return self._empty(self.shape, self.dtype)
        found = describe(out, "out")
        self._check(found, "out")
        if not found.writable:
            raise FieldError("out is read-only; the result cannot be written")
        if is_cupy_array(out) and out.flags.c_contiguous and found.pointer % self._part == 0:
            start = source.data.ptr
            apart = abs(found.pointer - start)
            if not apart or apart >= self._nbytes:
                return out
        return self._empty(self.shape, self.dtype)

    def _check(self, found: Described, name: str) -> None:
        if tuple(found.shape) != self.shape or found.dtype != self.dtype:
            raise FieldError(
                f"{name}: got shape {tuple(found.shape)} of {found.dtype}, this allreduce is of shape {self.shape} of "
                f"{self.dtype}; make another one for other arrays"
            )
        if found.device is not None and found.device != self._device:
            raise DeviceError(
                f"{name} lies on GPU {found.device}, rank {self._ground.world.rank} reduces on GPU {self._device}; "
                f"allocate under `with cupy.cuda.Device({self._device}):`"
            )


def _host(array: Any) -> Any:
    return np.ascontiguousarray(as_ndarray(array)).reshape(np.shape(array))


def _write(out: Any, result: Any) -> None:
    if is_device_array(out):
        as_device_array(out)[...] = result
    else:
        as_ndarray(out)[...] = result.get()
