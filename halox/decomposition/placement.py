"""Placement of ranks on blocks: ranks of one node get adjacent blocks, so that few bytes cross between nodes.

`place` tries these placements:

- Ranks in their own order, or node by node, on the blocks in the order of any permutation of the
  process grid's axes.
- Ranks node by node along a snake through the blocks, which turns at the end of each row. It suits
  nodes whose ranks do not fill a box.
- Ranks node by node, on the blocks tile by tile. A tile is a box with as many blocks as a node has
  ranks::

    8 ranks, 2 nodes (a, b), proc_shape (2, 4), rank order      tiles of (2, 2)

        a a a a                                                 a a b b
        b b b b                                                 a a b b

Here 4 faces are between nodes in rank order, and 2 with tiles (if no axis is periodic).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

_Blocks: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Placement:
    """Assignment of ranks to the blocks of the process grid."""

    proc_shape: tuple[int, ...]
    # Rank of each block in C order of the coordinates: a range in rank order, or a tuple.
    rank_of: Sequence[int]
    method: str  # name of the placement, for messages
    nodes: int
    bytes_between_nodes: int  # through all faces between blocks of different nodes
    bytes_between_nodes_by_rank_order: int  # the same for ranks on the blocks in C order

    @classmethod
    def by_rank(cls, proc_shape: Sequence[int]) -> Placement:
        """Place the ranks on the blocks in C order, all on one node."""
        shape = tuple(proc_shape)
        return cls(shape, range(math.prod(shape)), _RANK_ORDER, 1, 0, 0)

    @cached_property
    def block_of(self) -> Sequence[int]:
        """Index of each rank's block in C order."""
        in_order = isinstance(self.rank_of, range)
        return self.rank_of if in_order else tuple(np.argsort(self.rank_of).tolist())

    def coords_of(self, rank: int) -> tuple[int, ...]:
        block, coords = self.block_of[rank], []
        for extent in reversed(self.proc_shape):
            block, coord = divmod(block, extent)
            coords.append(coord)
        return tuple(reversed(coords))

    @cached_property
    def coords(self) -> tuple[tuple[int, ...], ...]:
        """Coordinates of the blocks of all ranks."""
        return tuple(map(self.coords_of, range(len(self.rank_of))))

    @property
    def shown(self) -> object:
        """The placement in errors, equal for equal placements: rank order, or the coordinates of all ranks."""
        return _RANK_ORDER if isinstance(self.rank_of, range) else self.coords

    def summary(self) -> str:
        """One sentence with the nodes, the placement and the bytes saved.

        Examples
        --------
        >>> placement = place((2, 4), (False, False), (8, 8), [0, 0, 0, 0, 1, 1, 1, 1])
        >>> print(placement.summary())  # doctest: +NORMALIZE_WHITESPACE
        8 ranks on 2 nodes, placed in tiles of 2x2 blocks: 16 bytes between nodes,
        32 in rank order (50 % less).
        """
        ranks = f"{len(self.rank_of)} rank{'s' * (len(self.rank_of) > 1)}"
        if self.nodes == 1:
            return f"{ranks} on 1 node, placed in rank order: nothing crosses between nodes."
        now, before = self.bytes_between_nodes, self.bytes_between_nodes_by_rank_order
        gained = (
            f", {before} in rank order ({100 * (before - now) / before:.0f} % less)"
            if now < before
            else ""
        )
        return (
            f"{ranks} on {self.nodes} nodes, placed {self.method}: {now} bytes between nodes"
            f"{gained}."
        )


_RANK_ORDER = "in rank order"


def place(
    proc_shape: Sequence[int],
    periodic: Sequence[bool],
    axis_bytes: Sequence[int],
    nodes: Sequence[int] | npt.NDArray[np.int32],
) -> Placement:
    """Put ranks on blocks so that few bytes cross between nodes.

    ``axis_bytes`` are the bytes that two ranks exchange through a face normal to each axis. ``nodes`` has the
    node of each rank: any integers, equal for ranks of one node. Returns the best of the placements that the
    module docstring lists, or rank order if no other placement is better. Equal arguments give equal results
    on all ranks. Edges and corners are not counted. Two ranks along a periodic axis share two faces.
    """
    shape = tuple(proc_shape)
    node_of = np.asarray(nodes, dtype=np.int64)
    candidates = _candidates(shape, node_of)
    method, rank_of = next(candidates)
    count = len(set(node_of.tolist()))
    cost = by_rank_order = _bytes_between(node_of[rank_of], periodic, axis_bytes)
    for other_method, other in candidates:
        # If each rank has a node, all placements cost the same.
        if cost == 0 or count == node_of.size:
            break
        other_cost = _bytes_between(node_of[other], periodic, axis_bytes)
        if other_cost < cost:
            method, rank_of, cost = other_method, other, other_cost
    ranks = range(node_of.size) if method == _RANK_ORDER else tuple(rank_of.ravel().tolist())
    return Placement(shape, ranks, method, count, cost, by_rank_order)


def _candidates(shape: tuple[int, ...], node_of: _Blocks) -> Iterator[tuple[str, _Blocks]]:
    """Yield candidate placements, rank order first: a description, and the rank of each block."""
    in_order = np.arange(node_of.size)
    # The stable sort keeps the ranks of a node in their order.
    by_node = np.argsort(node_of, kind="stable")
    c_order = tuple(range(len(shape)))
    orders = list(permutations(c_order))
    yield _RANK_ORDER, _fill(shape, shape, c_order, in_order)
    counts = sorted(set(Counter(node_of.tolist()).values()))
    for size in dict.fromkeys([*counts, math.gcd(*counts)]):
        for tile in _boxes(shape, size):
            method = f"in tiles of {'x'.join(map(str, tile))} blocks"
            # If all nodes have equally many ranks, the order of the tiles does not matter.
            for axes in orders if len(counts) > 1 else [c_order]:
                yield method, _fill(shape, tile, axes, by_node)
    for ranks, words in ((in_order, _RANK_ORDER), (by_node, "node by node")):
        for axes in orders:
            yield f"{words}, axes in the order {axes}", _fill(shape, shape, axes, ranks)
    for axes in orders:
        snake = _snake(tuple(shape[axis] for axis in axes)).transpose(np.argsort(axes))
        yield f"node by node along a snake, axes in the order {axes}", by_node[snake]


def _boxes(shape: tuple[int, ...], size: int) -> Iterator[tuple[int, ...]]:
    """Yield the boxes of ``size`` blocks that tile the process grid."""
    if not shape:
        if size == 1:
            yield ()
        return
    for extent in range(1, min(size, shape[0]) + 1):
        if size % extent == 0 and shape[0] % extent == 0:
            for rest in _boxes(shape[1:], size // extent):
                yield (extent, *rest)


def _fill(
    shape: tuple[int, ...], tile: tuple[int, ...], axes: Sequence[int], ranks: _Blocks
) -> _Blocks:
    """Rank of each block, for ranks placed tile by tile in C order of the permuted axes."""
    ndim = len(shape)
    tiles = [cells // extent for cells, extent in zip(shape, tile, strict=True)]
    tiled = ranks.reshape([tiles[a] for a in axes] + [tile[a] for a in axes])
    where = {axis: position for position, axis in enumerate(axes)}
    back = [position for a in range(ndim) for position in (where[a], ndim + where[a])]
    return tiled.transpose(back).reshape(shape)


def _snake(shape: tuple[int, ...]) -> _Blocks:
    """Position of each block on a path through all blocks; consecutive blocks on the path are neighbours."""
    if not shape:
        return np.zeros((), dtype=np.int64)
    row = _snake(shape[1:])
    backward = row.size - 1 - row
    return np.stack([i * row.size + (backward if i % 2 else row) for i in range(shape[0])])


def _bytes_between(nodes: _Blocks, periodic: Sequence[bool], axis_bytes: Sequence[int]) -> int:
    """Bytes through all faces between blocks on different nodes."""
    total = 0
    for axis, (wraps, face) in enumerate(zip(periodic, axis_bytes, strict=True)):
        crossing = np.diff(nodes, axis=axis, append=nodes.take([0], axis)) != 0
        if not wraps:
            crossing = crossing.take(range(nodes.shape[axis] - 1), axis)
        total += face * int(np.count_nonzero(crossing))
    return total
