"""Grids divided among ranks: options, division, layouts and allocation of fields.

A `Domain` has no plans, reductions or caches of calls. `halox.grid`, `halox.transpose`, `halox.fft`,
`halox.collectives`, `halox.gathering`, `halox.checkpoint` and `halox.xarray` build on it.
"""

from __future__ import annotations

from halox.domain.domain import Domain
from halox.domain.options import FieldOptions, GridOptions

__all__ = ["Domain", "FieldOptions", "GridOptions"]
