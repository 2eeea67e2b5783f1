"""Random nested datatypes for Hypothesis, as recipes from which halox and MPI both build a type.

A recipe is a tuple of the constructor's name, its arguments, and the recipes of its old types. A primitive's recipe
is ``("primitive", (type string,), ())``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from halox import datatypes
from halox.datatypes import Datatype

Recipe = tuple[str, tuple[Any, ...], tuple[Any, ...]]

PRIMITIVES = ("i1", "i2", "i4", "i8", "u2", "f4", "f8", "c8", "c16", "?")
MOST_BYTES = 1 << 13
MOST_SPAN = 1 << 14  # counts of up to 3 must stay below 1 << 16

# Zeros occur, but seldom enough that most types hold bytes.
_COUNTS = st.sampled_from((1, 2, 3, 4, 2, 3, 4, 1, 2, 3, 4, 2, 3, 4, 0))
_LENGTHS = st.sampled_from((1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 0))
_BYTE_STEPS = st.integers(-64, 64)


def build(recipe: Recipe) -> Datatype:
    """Build a recipe's type with halox's constructors."""
    name, arguments, olds = recipe
    if name == "primitive":
        return datatypes.primitive(arguments[0])
    types = [build(old) for old in olds]
    if name == "struct":
        return datatypes.struct(*arguments, types)
    if name == "resized":
        return datatypes.resized(types[0], *arguments)
    if name == "subarray":
        return datatypes.subarray(*arguments[:3], types[0], order=arguments[3])
    return getattr(datatypes, name)(*arguments, types[0])


def _small(made: Datatype) -> bool:
    places = (made.lb, made.ub, made.true_lb, made.true_ub, 0)
    return made.size <= MOST_BYTES and max(places) - min(places) <= MOST_SPAN // 4


@st.composite
def recipes(draw: st.DrawFn, depth: int = 4) -> Recipe:
    """Draw the recipe of a type with up to ``depth`` nested constructors."""
    return _recipe(draw, draw(st.sampled_from(range(depth, -1, -1))))


def _recipe(draw: st.DrawFn, depth: int) -> Recipe:
    if depth == 0:
        return ("primitive", (draw(st.sampled_from(PRIMITIVES)),), ())
    name = draw(st.sampled_from(sorted(_ARGUMENTS)))
    n_olds = draw(_LENGTHS) if name == "struct" else 1
    olds = tuple(_recipe(draw, depth - 1) for _ in range(n_olds))
    recipe = (name, _ARGUMENTS[name](draw, n_olds), olds)
    # A type too large for the test's memory is replaced by its old type. Rejecting the draw would waste an example.
    return recipe if _small(build(recipe)) else olds[0]


def _lists(draw: st.DrawFn, *entries: st.SearchStrategy[int]) -> tuple[list[int], ...]:
    n = draw(_COUNTS)
    return tuple([draw(entry) for _ in range(n)] for entry in entries)


def _subarray(draw: st.DrawFn, _: int) -> tuple[Any, ...]:
    boxes = draw(
        st.lists(
            st.tuples(st.integers(1, 4), st.integers(0, 2), st.integers(0, 2)),
            min_size=1,
            max_size=3,
        )
    )
    sizes = [before + box + after for box, before, after in boxes]
    subsizes = [box for box, _, _ in boxes]
    starts = [before for _, before, _ in boxes]
    return sizes, subsizes, starts, draw(st.sampled_from("CF"))


def _struct(draw: st.DrawFn, n: int) -> tuple[Any, ...]:
    return [draw(_LENGTHS) for _ in range(n)], [draw(st.integers(-80, 80)) for _ in range(n)]


_ARGUMENTS = {
    "contiguous": lambda draw, _: (draw(_COUNTS),),
    "vector": lambda draw, _: (draw(_COUNTS), draw(_LENGTHS), draw(st.integers(-4, 6))),
    "hvector": lambda draw, _: (draw(_COUNTS), draw(_LENGTHS), draw(_BYTE_STEPS)),
    "indexed": lambda draw, _: _lists(draw, _LENGTHS, st.integers(-6, 8)),
    "hindexed": lambda draw, _: _lists(draw, _LENGTHS, _BYTE_STEPS),
    "indexed_block": lambda draw, _: (
        draw(_LENGTHS),
        *_lists(draw, st.integers(-6, 8)),
    ),
    "hindexed_block": lambda draw, _: (draw(_LENGTHS), *_lists(draw, _BYTE_STEPS)),
    "struct": _struct,
    "subarray": _subarray,
    "resized": lambda draw, _: (draw(st.integers(-16, 16)), draw(st.integers(-40, 64))),
    "dup": lambda draw, _: (),
}


def scattered(
    rng: np.random.Generator, lengths: Any, word: int = 1, gap: int = 40
) -> tuple[Datatype, int]:
    """Return a type of disjoint blocks of given lengths in random order, and its span in bytes."""
    lengths = np.asarray(lengths)
    starts = np.cumsum(lengths + rng.integers(1, gap, lengths.size) * word) - lengths
    order = rng.permutation(lengths.size)
    made = datatypes.hindexed(lengths[order], starts[order], "u1")
    return made, int(starts[-1] + lengths[-1])
