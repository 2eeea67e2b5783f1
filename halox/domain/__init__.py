"""Grids divided among ranks: options, division, names of dimensions, layouts and allocation of fields.

A `Domain` has no plans, reductions or caches of calls: all rooms of what a grid can do build on it, and `halox.Grid`
puts them together. `options` reads the arguments of `Grid`, `division` divides, `layouts` finds the layout of an array
that a user gives. Begin with `domain`.
"""

from __future__ import annotations

from halox.domain.domain import Domain
from halox.domain.options import FieldOptions, GridOptions

__all__ = ["Domain", "FieldOptions", "GridOptions"]
