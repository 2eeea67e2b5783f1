"""Simplified trees, against the block lists of the datatypes."""

from __future__ import annotations

import numpy as np
import pytest

from halox import datatypes as dt
from halox.packing.traversal_tree import (
    Branch,
    Gather,
    Regular,
    Repeat,
    Search,
    Tree,
    common_word,
    nesting,
    simplified,
)


def parts(tree: Tree):
    """Yield the tree and all of its subtrees."""
    yield tree
    children = getattr(tree, "children", ()) or [getattr(tree, "child", None)]
    for child in children:
        if child is not None:
            yield from parts(child)


def depth(tree: Tree) -> int:
    return sum(1 for _ in parts(tree))


def test_regular_types_are_one_leaf():
    for datatype in (
        dt.vector(5, 3, 7, "f4"),
        dt.subarray((9, 8, 7), (3, 4, 5), (1, 2, 1), "f8", order="F"),
        dt.indexed_block(2, np.arange(100) * 5, "f8"),
        dt.struct([1, 2], [0, 8], ["f8", "i4"]),
        dt.resized(dt.dup(dt.hvector(4, 1, -12, "i2")), 8, 100),
    ):
        offset, tree = simplified(datatype)
        assert isinstance(tree, Regular)
        assert offset == datatype.strided.offset


def test_lists_of_one_length_need_no_search():
    rng = np.random.default_rng(1)
    chosen = np.sort(rng.permutation(1180)[:1024])
    assert (np.diff(chosen) == 1).any(), "some lie side by side"
    for displacements in (chosen, rng.permutation(chosen)):
        datatype = dt.indexed_block(1, displacements, "f8")
        offset, tree = simplified(datatype, 50)
        assert isinstance(tree, Repeat)
        assert isinstance(tree.child, Gather)
        assert (offset + tree.child.displacements).tolist() == (displacements * 8).tolist()


def test_lists_of_long_runs_stay_short():
    lengths = [1000003, 17, 999983, 5]
    datatype = dt.hindexed(lengths, [0, 2000000, 3000000, 9000000], "u1")
    _, tree = simplified(datatype)
    assert isinstance(tree, Search)
    assert tree.ends.tolist() == np.cumsum(lengths).tolist()
    assert tree.child.blocks.block_bytes == 1000003


def test_small_irregular_types_become_one_list():
    inner = dt.struct([1, 1, 3], [0, 16, 32], ["f8", "i4", dt.vector(2, 1, 2, "i4")])
    datatype = dt.struct([1, 1], [0, 200], [inner, dt.indexed([1, 2], [0, 3], "f8")])
    _, flat = simplified(datatype)
    _, deep = simplified(datatype, flat_blocks=0)
    assert depth(flat) == 2
    assert any(isinstance(part, Branch) for part in parts(deep))


def test_repetition_does_not_expand_lists():
    irregular = dt.indexed([1, 2, 1], [0, 5, 3], "f8")
    datatype = dt.struct([10**9, 10**8], [0, 10**12], [irregular, dt.vector(3, 1, 2, "f4")])
    _, tree = simplified(dt.contiguous(10**3, datatype), 7)
    assert tree.size == 7000 * datatype.size
    assert depth(tree) < 10


def test_runs_in_disguise_are_not_expanded_either():
    run = dt.indexed_block(1, [0, 1, 2], "f8")
    datatype = dt.struct([10**9, 10**9], [0, 10**11], [run, "i4"])
    offset, tree = simplified(datatype, few_units=0)
    assert isinstance(tree, Search)
    assert (offset, tree.ends.tolist()) == (0, [24 * 10**9, 28 * 10**9])


def test_shared_subtrees_are_simplified_once():
    datatype = dt.indexed([1, 2], [0, 3], "f8")
    for level in range(30):
        datatype = dt.struct([1, 2], [0, 100 * 3**level], [datatype, datatype])
    _, tree = simplified(datatype)
    seen = set()
    pending = [tree]
    while pending:
        part = pending.pop()
        if id(part) not in seen:
            seen.add(id(part))
            pending += getattr(part, "children", ()) or ()
            pending += [part.child] if hasattr(part, "child") else []
    assert len(seen) < 100
    assert tree.size == 24 * 3**30


def test_no_bytes():
    for datatype in (
        dt.contiguous(0, "f8"),
        dt.struct([], [], []),
        dt.indexed([0, 0], [1, 2], "f8"),
    ):
        assert simplified(datatype, 3) is None
    assert simplified(dt.primitive("f8"), 0) is None


@pytest.mark.parametrize(
    ("datatype", "word"),
    [
        (dt.contiguous(32, "f8"), 16),
        (dt.vector(3, 1, 2, "f8"), 8),
        (dt.vector(3, 2, 4, "f8"), 16),
        (dt.hvector(3, 1, 12, "f8"), 4),
        (dt.hvector(3, 1, -6, "i2"), 2),
        (dt.hindexed([16, 32], [0, 33], "u1"), 1),
        (dt.hindexed([16, 34], [0, 64], "u1"), 2),
        (dt.struct([1, 1], [0, 40], [dt.indexed([1, 3], [0, 5], "f8"), "i4"]), 4),
    ],
    ids=str,
)
def test_the_word_divides_everything(datatype, word):
    _, tree = simplified(datatype)
    assert common_word(tree) == word


def test_nesting_counts_irregular_constructors():
    datatype = dt.contiguous(9, dt.vector(2, 1, 2, "f8"))
    assert nesting(datatype) == 0
    for level in range(1, 50):  # each level has twice as many bytes
        datatype = dt.struct([1, 1, 1], [0, 32, 64 + level], [datatype, datatype, "i1"])
        datatype = dt.resized(datatype, 0, 64)
        assert nesting(datatype) == 2 * level
