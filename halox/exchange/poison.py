"""Check for stale halos: with ``HALOX_DEBUG_HALO=1`` exchanges fill halos with NaN before they fill them with values.

A stencil that reads the halo between `Plan.start` and `Plan.finish` then computes NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from halox.packing.host import element_view
from halox.paths.base import Channel, Job
from halox.runtime.arrays import Described, DType


def poison_of(dtype: DType) -> complex | float | int | None:
    """Return the value that marks cells as stale: NaN, or the least integer; None for all other dtypes.

    Examples
    --------
    >>> poison_of(np.dtype("f4")), poison_of(np.dtype("i1")), poison_of(np.dtype("S3"))
    (nan, -128, None)
    """
    if dtype.kind in "iu":
        return int(np.iinfo(dtype).min)
    return {"f": np.nan, "c": complex(np.nan, np.nan)}.get(dtype.kind)


class PoisonChannel(Channel):
    """Fills the cells that an exchange receives, on this rank alone.

    It is the first channel of a plan: a neighbour that reads or writes this rank's arrays in place waits until a later
    channel has started. The cells that neighbours read are owned cells, and halo cells that local copies fill first.
    """

    needs_host = False
    is_movable = True
    is_measured = False  # it would leave the halos without values

    def __init__(self, job: Job, described: Sequence[Described], device: int | None) -> None:
        self._device = device
        self._origins = [0 if device is not None else array.origin for array in job.arrays]
        self._places, self._values = [], []
        for part in [part for message in job.receives for part in message.parts]:
            dtype, strided = described[part.array].dtype, part.strided
            value = poison_of(dtype)
            if value is not None:
                assert strided is not None, "boxes of fields have a strided form"
                self._places.append((part.array, element_view(strided, dtype)))
                self._values.append(value)
        is_on_host = device is None
        self.bind(self.views([a.memory if is_on_host else a.pointer for a in job.arrays]))

    def views(self, memories: Sequence[Any]) -> list[Any]:
        """View the cells in the memory of some arrays."""
        views = []
        for number, (shape, dtype, offset, strides) in self._places:
            memory, start = memories[number], self._origins[number] + offset
            if self._device is None:
                views.append(np.ndarray(shape, dtype, memory, start, strides))
                continue
            from halox.runtime.gpu.memory import device_view

            views.append(device_view(memory + start, shape, dtype, strides, self._device))
        return views

    def bind(self, views: list[Any]) -> None:
        """Use the arrays of these views."""
        self._views = views

    def start(self) -> None:
        """Fill the cells, on a GPU on the current stream."""
        for view, value in zip(self._views, self._values, strict=True):
            view[...] = value

    def close(self) -> None:
        """Drop the arrays."""
        self._views, self._values = [], []
