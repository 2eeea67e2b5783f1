"""Decomposition of a grid among ranks, computed with integers: no arrays, no communicator, no device.

``decompose`` divides a grid among ranks. ``FieldLayout`` describes a field in a rank's array, with the
boxes that an exchange sends and receives. ``overlaps`` finds the boxes to send from one decomposition of a
grid to another.
"""

from __future__ import annotations

from halox.decomposition.axis_layout import Box
from halox.decomposition.domain import Decomposition, Neighbour, decompose, directions
from halox.decomposition.fields import FieldLayout, FieldSpec, Region, infer_spec, ways_to_declare
from halox.decomposition.normalise import Halo, normalise_halo
from halox.decomposition.parity import PARITIES, Parity
from halox.decomposition.partition import AxisPartition
from halox.decomposition.placement import Placement, place
from halox.decomposition.transposes import (
    Overlap,
    check_same_field,
    check_same_grid,
    common_axes,
    inverse_axes,
    normalise_axes,
    overlaps,
)

__all__ = [
    "PARITIES",
    "AxisPartition",
    "Box",
    "Decomposition",
    "FieldLayout",
    "FieldSpec",
    "Halo",
    "Neighbour",
    "Overlap",
    "Parity",
    "Placement",
    "Region",
    "check_same_field",
    "check_same_grid",
    "common_axes",
    "decompose",
    "directions",
    "infer_spec",
    "inverse_axes",
    "normalise_axes",
    "normalise_halo",
    "overlaps",
    "place",
    "ways_to_declare",
]
