"""Transforms of NumPy arrays along some of their axes, written into given arrays.

`numpy.fft` writes into a given array and needs no memory for double precision. For single precision it computes in
double precision unless it scales; there SciPy takes a third of its time, and is used where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Literal, TypeAlias

import numpy as np

from halox.runtime.arrays import Array, DType

Run: TypeAlias = Callable[[Array, Array], None]
"""Transforms the first array into the second one."""


Norm: TypeAlias = Literal["backward", "ortho", "forward"]


class HostTransforms:
    """Transforms on the host; the methods return functions of (source, target), which may be one array for `c2c`.

    ``norm`` is that of `numpy.fft` for the direction. `c2r` destroys its source if it transforms several axes.
    """

    scales = True  # transforms apply a norm at no cost
    turns = False  # lines that are contiguous are worth a transpose with permuted axes

    def begin(self) -> None:
        """Begin a call: nothing to do on the host."""

    def close(self) -> None:
        """Release what is kept: nothing on the host."""

    def key(self, array: Array) -> object:
        """Return what a function depends on of an array: nothing, they fit all of a shape and dtype."""
        return None

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """Return an array with undefined contents."""
        return np.empty(shape, dtype)

    def destroys(self, axes: Sequence[int]) -> bool:
        """Whether `c2r` along these axes destroys its source."""
        return len(axes) > 1

    def c2c(
        self, source: Array, target: Array, axes: Sequence[int], *, forward: bool, norm: Norm
    ) -> Run:
        """Transform complex numbers along some axes."""
        library = _library(target.dtype)
        if library is not None:
            along = library.fftn if forward else library.ifftn

            def in_place(source: Array, target: Array) -> None:
                if source is not target:
                    np.copyto(target, source)
                found = along(target, axes=axes, norm=norm, overwrite_x=True)
                if not np.may_share_memory(found, target):
                    np.copyto(target, found)

            return in_place
        one = np.fft.fft if forward else np.fft.ifft

        def run(source: Array, target: Array) -> None:
            for axis in reversed(axes):
                one(source, axis=axis, norm=norm, out=target)
                source = target

        return run

    def r2c(self, source: Array, target: Array, axes: Sequence[int], *, norm: Norm) -> Run:
        """Transform real numbers along some axes, the last of which is halved."""
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
        """Transform halved spectra to real numbers along some axes, the last of which is halved."""
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
    """Return scipy.fft for single precision where it is installed, else None."""
    return _scipy() if dtype == np.complex64 else None


@cache
def _scipy() -> ModuleType | None:
    try:
        import scipy.fft
    except ImportError:
        return None
    found: ModuleType = scipy.fft
    return found
