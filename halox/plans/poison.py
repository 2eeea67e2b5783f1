"""Check for stale halos: with ``HALOX_DEBUG_HALO=1`` exchanges fill halos with NaN before they fill them with values.

A stencil that reads the halo between `Plan.start` and `Plan.finish` then computes NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from halox.decomposition import WallFill
from halox.packing.host_views import View, element_view
from halox.paths.base import Channel, Job
from halox.plans.wall_operations import FieldWalls, box_view, view_in
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
    """Fills the halo cells that an exchange receives or fills at walls, on this rank alone.

    It is the first channel of a plan: a neighbour that reads or writes this rank's arrays in place waits until a later
    channel has started. The cells that neighbours read are owned cells, and halo cells that local copies fill first.
    """

    needs_host = False
    is_movable = True
    timeline = (("start", "poison"),)
    is_measured = False  # it would leave the halos without values

    def __init__(
        self,
        job: Job,
        walls: Sequence[FieldWalls],
        described: Sequence[Described],
        device: int | None,
    ) -> None:
        self._device = device
        self._origins = [0 if device is not None else array.origin for array in job.arrays]
        boxes: list[tuple[int, View]] = []
        for part in [part for message in job.receives for part in message.parts]:
            assert part.strided is not None, "boxes of fields have a strided form"
            boxes.append((part.array, element_view(part.strided, described[part.array].dtype)))
        for one in walls:
            fills = [fill for fill in one.walls.fills() if fill.along.boundary.kind != "phase"]
            boxes += [(one.number, _beyond(fill, described[one.number])) for fill in fills]
        poisons = [(place, poison_of(place[1].dtype)) for place in boxes]
        self._places = [place for place, value in poisons if value is not None]
        self._values = [value for _, value in poisons if value is not None]
        is_on_host = device is None
        self.bind(self.views([a.memory if is_on_host else a.pointer for a in job.arrays]))

    def views(self, memories: Sequence[Any]) -> list[Any]:
        return [
            view_in(memories[number], self._origins[number], view, self._device)
            for number, view in self._places
        ]

    def bind(self, views: list[Any]) -> None:
        self._views = views

    def start(self) -> None:
        """Fill the cells, on a GPU on the current stream."""
        for view, value in zip(self._views, self._values, strict=True):
            view[...] = value

    def close(self) -> None:
        self._views, self._values = [], []


def _beyond(fill: WallFill, described: Described) -> View:
    """Return the cells of a fill without owned points on the wall."""
    axis, cut = fill.along.array_axis, fill.along.target
    layers = [cut.start + n for n, depth in enumerate(fill.along.depths) if depth]
    beyond = slice(layers[0], layers[-1] + 1) if layers else slice(0)
    return box_view((*fill.box[:axis], beyond, *fill.box[axis + 1 :]), described)
