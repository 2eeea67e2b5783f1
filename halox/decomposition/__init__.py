"""Decomposition of a grid among ranks, in integers only: no arrays, no communicator, no device.

``decompose`` divides a grid; ``FieldLayout`` is the layout of a field in a rank's array, with the boxes
that an exchange moves; ``overlaps`` are the boxes that pass between two divisions.
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
