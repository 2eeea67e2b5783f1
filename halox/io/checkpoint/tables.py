"""Particles in checkpoints: tables of arrays with a row for each particle, any number of them on each rank.

The array "v" of the table "p" is stored as "p.v", like a field of a grid of one axis, whose blocks are the rows of the
ranks. A load gives each rank an equal part of the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from halox.decomposition import AxisPartition, Decomposition, FieldLayout, FieldSpec, Placement
from halox.io.checkpoint import chunks


def layout_of(rows: Sequence[int], rank: int, components: Sequence[int]) -> FieldLayout:
    """Return the layout of an array, given the rows of each rank, of which there may be none."""
    axis = AxisPartition(sum(rows), (0, *accumulate(rows)), periodic=False)
    cut = Decomposition((axis,), Placement.by_rank((len(rows),)))
    return FieldLayout(cut, rank, FieldSpec(((0, 0),), components_after=tuple(components)))


def shard_rows(rows: int, row_bytes: int) -> tuple[int, int]:
    """Return the rows of a shard and of its chunks in an output, whose records may have many more rows or fewer."""
    chunk = max(min(max(rows, 1 << 16), chunks.SHARD_BYTES // row_bytes) // 64, 1)
    return 64 * chunk, chunk


def joined(arrays: Mapping[str, Any], table_of: Mapping[str, str]) -> dict[str, Any]:
    """Return loaded arrays by name, those of a table in a dict.

    Examples
    --------
    >>> joined({"u": 1, "p.v": 2, "p.w": 3}, {"u": "", "p.v": "p", "p.w": "p"})
    {'u': 1, 'p': {'v': 2, 'w': 3}}
    """
    found: dict[str, Any] = {}
    for name, array in arrays.items():
        table = table_of[name]
        (found.setdefault(table, {}) if table else found)[name.removeprefix(f"{table}.")] = array
    return found
