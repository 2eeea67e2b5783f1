"""Costs of transposes: peers and runs of messages; tests/mpi/test_transpose.py compares the cells."""

from __future__ import annotations

import numpy as np

from halox.decomposition import FieldLayout, FieldSpec, decompose
from halox.plans.transpose import (
    TransposeEnd,
    memory_order,
    overlaps,
    transpose_draft,
)
from halox.runtime.arrays import describe


def test_pencils_that_keep_a_cut_talk_within_a_row_of_ranks() -> None:
    x = decompose((8, 8, 8), 8, proc_shape=(1, 2, 4))
    y = decompose((8, 8, 8), 8, proc_shape=(2, 1, 4))
    none = FieldSpec(((0, 0),) * 3)
    for rank in range(8):
        peers = [o.peer for o in overlaps(FieldLayout(x, rank, none), y, (0, 1, 2))]
        assert peers == [rank % 4, rank % 4 + 4]


def test_many_ranks_cost_no_more_than_the_peers() -> None:
    """A rank exchanges with 128 of 16,384 ranks; the search visits parts of axes, never all ranks."""
    a, b = (decompose((1024,) * 3, 128 * 128, proc_shape=p) for p in ((1, 128, 128), (128, 1, 128)))
    found = overlaps(FieldLayout(a, 4711, FieldSpec(((0, 0),) * 3)), b, (0, 1, 2))
    assert len(found) == 128


def test_runs_are_long_where_both_arrays_lie_alike() -> None:
    """The packed order follows the order in memory, so that Fortran arrays are not packed element by element."""
    rows, columns = (decompose((16, 16), 4, proc_shape=p) for p in ((4, 1), (1, 4)))
    none = FieldSpec(((0, 0),) * 2)
    for order in "CF":
        u, v = np.zeros((4, 16), order=order), np.zeros((16, 4), order=order)
        walk = memory_order(describe(u), (0, 1))
        draft = transpose_draft(
            TransposeEnd(u, overlaps(FieldLayout(rows, 0, none), columns, (0, 1)), (0, 1)),
            TransposeEnd(v, overlaps(FieldLayout(columns, 0, none), rows, (0, 1)), (0, 1)),
            walk,
        )
        # A box has 4 x 4 cells. Its rows (or columns) are 32 bytes; contiguous ones merge to longer blocks.
        assert min(m.block_bytes for m in (*draft.sends, *draft.receives)) >= 32
