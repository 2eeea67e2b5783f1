"""Decomposition of a grid among ranks, computed with integers: no arrays, no communicator, no device.

``decompose`` divides a grid among ranks. A `FieldSpec` has the properties of a field, a `FieldLayout` the places of its
points in a rank's array, and ``exchange_regions`` the boxes that an exchange sends and receives. The rooms above turn
boxes into datatypes and messages. Begin with `partition`, then `field_layout` and `field_regions`.
"""

from __future__ import annotations

from halox.decomposition.axis_layout import Box
from halox.decomposition.boundaries import (
    Boundaries,
    Boundary,
    boundary_text,
    normalise_boundary,
    with_periodic_boundary,
)
from halox.decomposition.domain import Decomposition, Neighbour, decompose
from halox.decomposition.field_layout import FieldLayout, component_axes
from halox.decomposition.field_regions import (
    Region,
    check_widths,
    exchange_regions,
    exchange_slabs,
    second_images,
    walls_of,
)
from halox.decomposition.field_spec import FieldSpec
from halox.decomposition.normalise import (
    Halo,
    normalise_grid_shape,
    normalise_halo,
    normalise_periodic,
)
from halox.decomposition.parity import PARITIES, Parity
from halox.decomposition.partition import AxisPartition
from halox.decomposition.placement import Placement, place
from halox.decomposition.procgrid import block_cells
from halox.decomposition.walls import AxisFill, WallFill, WallRegion, Walls

__all__ = [
    "PARITIES",
    "AxisFill",
    "AxisPartition",
    "Boundaries",
    "Boundary",
    "Box",
    "Decomposition",
    "FieldLayout",
    "FieldSpec",
    "Halo",
    "Neighbour",
    "Parity",
    "Placement",
    "Region",
    "WallFill",
    "WallRegion",
    "Walls",
    "block_cells",
    "boundary_text",
    "check_widths",
    "component_axes",
    "decompose",
    "exchange_regions",
    "exchange_slabs",
    "normalise_boundary",
    "normalise_grid_shape",
    "normalise_halo",
    "normalise_periodic",
    "place",
    "second_images",
    "walls_of",
    "with_periodic_boundary",
]
