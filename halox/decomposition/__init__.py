"""How a grid is divided among ranks, in integers only: no arrays, no communicator, no device.

``decompose`` divides a grid; ``FieldLayout`` says where a field's cells lie in a rank's array
and which boxes an exchange moves.
"""

from __future__ import annotations

from halox.decomposition.domain import Decomposition, Neighbour, decompose, directions
from halox.decomposition.fields import Box, FieldLayout, FieldSpec, Region, infer_spec
from halox.decomposition.normalise import (
    Halo,
    normalise_blocks,
    normalise_grid_shape,
    normalise_halo,
    normalise_periodic,
    normalise_proc_shape,
    normalise_ranks,
)
from halox.decomposition.partition import AxisPartition, WidthLimit, owned_range
from halox.decomposition.placement import Placement, place
from halox.decomposition.procgrid import choose_proc_shape, counted_halo

__all__ = [
    "AxisPartition",
    "Box",
    "Decomposition",
    "FieldLayout",
    "FieldSpec",
    "Halo",
    "Neighbour",
    "Placement",
    "Region",
    "WidthLimit",
    "choose_proc_shape",
    "counted_halo",
    "decompose",
    "directions",
    "infer_spec",
    "normalise_blocks",
    "normalise_grid_shape",
    "normalise_halo",
    "normalise_periodic",
    "normalise_proc_shape",
    "normalise_ranks",
    "owned_range",
    "place",
]
