"""Number of 32-byte sectors of memory that a layout touches: a lower bound of a GPU's traffic."""

from __future__ import annotations

import numpy as np

from halox.datatypes import Datatype

SECTOR = 32


def sectors(datatype: Datatype, count: int = 1, origin: int = 0) -> int:
    """Count the distinct sectors that items of a datatype touch.

    Parameters
    ----------
    count : int
        Items, one extent apart.
    origin : int
        Address of displacement 0; matters modulo 32.

    Examples
    --------
    >>> from halox.datatypes import vector
    >>> sectors(vector(100, 1, 4, "f8")), sectors(vector(100, 1, 2, "f8"))
    (100, 50)
    """
    blocks = datatype.blocks(count).shifted(origin % SECTOR)
    if not blocks.n_blocks:
        return 0
    first = blocks.offsets // SECTOR
    last = (blocks.offsets + blocks.lengths - 1) // SECTOR
    if (np.diff(first) < 0).any():
        order = np.argsort(first, kind="stable")
        first, last = first[order], last[order]
    # A block adds the sectors behind the last one of all blocks before.
    reached = np.maximum.accumulate(last)
    new_from = first.copy()
    np.maximum(first[1:], reached[:-1] + 1, out=new_from[1:])
    return int(np.maximum(last - new_from + 1, 0).sum())
