"""FFTs of NumPy arrays along some of their axes, with given output arrays.

`numpy.fft` writes into a given array and allocates no memory in double precision. In single precision, without a
scaling norm, it computes in double precision. SciPy takes a third of the time in this case, and is used for single
precision if it is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Literal, TypeAlias

import numpy as np

from halox.runtime.arrays import Array, DType

Run: TypeAlias = Callable[[Array, Array], None]
"""Transforms the first array into the second."""


Norm: TypeAlias = Literal["backward", "ortho", "forward"]


class HostTransforms:
    """FFTs on the host. Methods return functions of (source, target); for `c2c` both may be the same array.

    ``norm`` has the meaning of ``norm`` in `numpy.fft`. `c2r` overwrites its source if it transforms several axes.
    """

    scales = True  # transforms apply a norm at no cost
    turns = False  # intermediate stages need not store transformed axes innermost

    def begin(self) -> None:
        """Begin a call: nothing to do on the host."""

    def close(self) -> None:
        """Release cached resources: the host has none."""

    def key(self, array: Array) -> object:
        """Return the cache key of an array: None, since a function fits all arrays of one shape and dtype."""
        return None

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        return np.empty(shape, dtype)

    def destroys(self, axes: Sequence[int]) -> bool:
        return len(axes) > 1

    def c2c(
        self, source: Array, target: Array, axes: Sequence[int], *, forward: bool, norm: Norm
    ) -> Run:
        library = _library(target.dtype)
        if library is not None:
            along = library.fftn if forward else library.ifftn

            def in_place(source: Array, target: Array) -> None:
                if source is not target:
                    np.copyto(target, source)
                result = along(target, axes=axes, norm=norm, overwrite_x=True)
                if not np.may_share_memory(result, target):
                    np.copyto(target, result)

            return in_place
        along_axis = np.fft.fft if forward else np.fft.ifft

        def run(source: Array, target: Array) -> None:
            for axis in reversed(axes):
                along_axis(source, axis=axis, norm=norm, out=target)
                source = target

        return run

    def r2c(self, source: Array, target: Array, axes: Sequence[int], *, norm: Norm) -> Run:
        """Transform real numbers along some axes; the last of ``axes`` is halved."""
        *others, last = axes
        library = _library(target.dtype)
        rest = self.c2c(target, target, others, forward=True, norm=norm) if others else None

        def run(source: Array, target: Array) -> None:
            if library is None:
                np.fft.rfft(source, axis=last, norm=norm, out=target)
            else:
                target[...] = library.rfft(source, axis=last, norm=norm)
            if rest is not None:
                rest(target, target)

        return run

    def c2r(self, source: Array, target: Array, axes: Sequence[int], *, norm: Norm) -> Run:
        """Transform halved spectra to real numbers along some axes; the last of ``axes`` is halved."""
        *others, last = axes
        points = target.shape[last]
        library = _library(source.dtype)
        rest = self.c2c(source, source, others, forward=False, norm=norm) if others else None

        def run(source: Array, target: Array) -> None:
            if rest is not None:
                rest(source, source)
            if library is None:
                np.fft.irfft(source, points, axis=last, norm=norm, out=target)
            else:
                target[...] = library.irfft(source, points, axis=last, norm=norm)

        return run


def _library(dtype: DType) -> ModuleType | None:
    """Return scipy.fft for single precision if it is installed, else None."""
    return _scipy() if dtype == np.complex64 else None


@cache
def _scipy() -> ModuleType | None:
    try:
        import scipy.fft
    except ImportError:
        return None
    module: ModuleType = scipy.fft
    return module
