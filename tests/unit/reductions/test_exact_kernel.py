"""The kernel of reproducible reductions, compiled as C++: exact sums by Python's fractions, rounded once."""

from __future__ import annotations

from fractions import Fraction
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from halox.packing.strided_plan import MAX_WORDS
from halox.reductions.device import field_plans
from halox.reductions.device.field_plans import (
    EXACT_CELLS,
    EXACT_WORDS,
    field_row,
    plan_field,
)
from halox.reductions.device.kernel_reductions import FieldReduction
from halox.reductions.field_operations import EXACT_OPERATIONS, FieldOperation
from halox.runtime.arrays import describe
from tests.exact import KINDS, TIES, hard, norm, products, same_bits, sums
from tests.fakes.cpu_allreduce import Stream, connect, connect_fields, reduce_once, without_gpu
from tests.support import require, trials

require("cxx")


def reduced(name: str, fields: list[Any], others: Any = None, calls: int = 1, seed: int = 0) -> Any:
    """Return the result of the last call, which must have the same bits on all ranks."""
    ranks = connect_fields(EXACT_OPERATIONS[name], fields, others)
    is_complex = fields[0].dtype.kind == "c" and name != "norm"
    for _ in range(calls):
        found = reduce_once(ranks, "c16" if is_complex else "f8", multiprocessors=2, seed=seed)
        assert len({one.tobytes() for one in found}) == 1
    return found[0]


@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_hard_numbers(kind: str) -> None:
    """In one call and in two, since the words are 0 again after a launch."""
    for number, ranks in [(0, 3), (1, 1), (2, 3), (3, 2)][: trials(3) + 1]:
        rng = np.random.default_rng([number, ranks, KINDS.index(kind)])
        fields = [hard(kind, int(n), rng) for n in rng.integers(1, 3000, ranks)]
        wanted = sums(np.concatenate(fields))
        assert same_bits(reduced("sum", fields, calls=1 + number % 2, seed=number), wanted), number


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16", "i8", "?"])
def test_dtypes_and_reductions(dtype: str) -> None:
    rng = np.random.default_rng(3)
    shapes = [(9, 12, 7), (8, 12, 7), (1, 3, 2)]
    both = []
    for _ in range(2):
        wide = [hard("normal", 2 * int(np.prod(shape)), rng) for shape in shapes]
        if np.dtype(dtype).kind == "c":
            wide = [each.view("c16") for each in wide]
        scale = 1e18 if dtype == "i8" else 1
        both.append(
            [
                (each * scale).astype(dtype)[: int(np.prod(shape))].reshape(shape)[::-1, :, ::-1]
                for each, shape in zip(wide, shapes, strict=True)
            ]
        )
    a, b = (np.concatenate([each.reshape(-1) for each in fields]) for fields in both)
    assert same_bits(reduced("norm", both[0]), norm(a))
    if np.dtype(dtype).kind in "fc":
        assert same_bits(reduced("sum", both[0]), sums(a))
        assert same_bits(reduced("dot", *both), products(a, b))


@pytest.mark.parametrize("value", [64 - 2.0**-47, -64 + 2.0**-47, 64.0])
def test_threads_that_fill_their_slices(value: float) -> None:
    """More addends of a thread than a slice takes, with one sign: the largest of its bin, or the least of the next."""
    cells = np.full((20, 190, 160), value)
    cells[-1] = 2.0**-40
    with patch.object(field_plans, "BLOCKS_PER_SM", 1):
        ranks = connect_fields(EXACT_OPERATIONS["sum"], [cells[:, 1:-1]], sms=1)
        ((*_, launch),) = ranks[0].reduction._launches.values()
        assert cells[:-1, 1:-1].size / (launch.threads * launch.blocks) > 2100
        found = reduce_once(ranks, "f8")
    layer = 188 * 160
    wanted = Fraction(value) * 19 * layer + Fraction(2) ** -40 * layer
    assert same_bits(found[0], np.float64(float(wanted)))


def test_ties() -> None:
    """A complex sum is two sums: of the numbers, and of their negatives."""
    for numbers in TIES:
        x = np.array(numbers) * (1 - 1j)
        assert same_bits(reduced("sum", [x[:2], x[2:]]), sums(x)), numbers


def test_words_of_a_rank_and_their_sum() -> None:
    """The two launches between which another allreduce adds the words of the ranks as integers."""
    rng = np.random.default_rng(4)
    parts = [hard(kind, 500, rng) + 1j * hard("cancelling", 500, rng) for kind in KINDS[:-1]]
    total = np.zeros(2 * EXACT_WORDS, "i8")

    def make(operation: FieldOperation) -> Any:
        def alone(world: Any, arena: Any) -> FieldReduction:
            found = FieldReduction(world, arena, operation, np.dtype("c16"), 1)
            found.open_alone()
            return found

        (rank,) = connect(1, alone)
        return rank.reduction

    words_of, rounded = make(EXACT_OPERATIONS["sum"].before_ranks), make(EXACT_OPERATIONS["sum"])
    stream, out = Stream(0, "random", 1, 0, 0), np.zeros(1, "c16")
    with without_gpu():
        for part in parts:
            words = np.zeros_like(total)
            words_of([describe(part)], words.ctypes.data, stream)
            assert np.abs(words[: EXACT_WORDS - 4]).max() <= 2**39 + 2**20
            total += words
        rounded.of_value(total.ctypes.data, out.ctypes.data, stream)
    assert same_bits(out[0], sums(np.concatenate(parts)))


def test_fields_of_many_cells_have_enough_blocks() -> None:
    row = field_row(0, (MAX_WORDS,), (8,), 8)
    assert row is not None
    plan = plan_field(EXACT_OPERATIONS["sum"], np.dtype("f8"), row, 1, sms=1)
    assert plan.blocks * EXACT_CELLS >= MAX_WORDS
