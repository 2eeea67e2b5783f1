"""Exact sums on the host: Python's fractions, rounded once; the same bits of any partition and order."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halox.reductions.host.exact_sums import MOST, RECORD_BYTES, ExactSum, exact_sums, fold_exactly
from tests.exact import KINDS, TIES, exact_sum, hard, norm, products, same_bits, sums
from tests.support import trials


def added(values: np.ndarray) -> ExactSum:
    total = ExactSum()
    total.add(values)
    return total


def by_fractions(values: np.ndarray) -> float:
    return float(sum(map(Fraction, values.tolist()), Fraction()))


@settings(max_examples=trials(200), deadline=None)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=40), st.randoms())
def test_any_doubles_in_any_order_and_partition(values: list[float], random: object) -> None:
    x = np.array(values, "f8")
    wanted = exact_sum(values)
    assert same_bits(added(x).rounded(), wanted)
    random.shuffle(values)  # type: ignore[attr-defined]
    cut = random.randint(0, len(values))  # type: ignore[attr-defined]
    records = [added(np.array(part, "f8")).record() for part in (values[:cut], values[cut:])]
    assert {len(record) for record in records} == {RECORD_BYTES}
    assert same_bits(ExactSum(records).rounded(), wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.part(2)
def test_partitions(kind: str) -> None:
    """1 to 300 parts, in a random order, with sums of sums."""
    for number in range(trials(20) // 2):
        rng = np.random.default_rng([number, KINDS.index(kind)])
        x = hard(kind, int(rng.integers(1, 3000)), rng)
        wanted = exact_sum(x)
        parts = np.array_split(rng.permutation(x), int(rng.integers(1, 301)))
        records = [added(part).record() for part in parts]
        halves = [ExactSum(records[::2]).record(), ExactSum(records[1::2]).record()]
        assert same_bits(ExactSum(halves).rounded(), wanted), number


@pytest.mark.parametrize("sign", [1, -1])
def test_ties(sign: int) -> None:
    for numbers in TIES:
        wanted = float(sum(map(Fraction, numbers)) * sign)
        assert same_bits(added(sign * np.array(numbers)).rounded(), wanted), numbers
        assert same_bits(exact_sum([sign * x for x in numbers]), wanted)


def test_more_numbers_than_a_block() -> None:
    """Blocks that are full of the largest or smallest numbers of a slice, and a block with a large number."""
    for value in (2.0**-1074, 1.0, np.nextafter(2.0, 0), 2.0**899 - 2.0**840, 1.7e308, -1.7e308):
        x = np.full(2 * MOST + 5, value)
        x[-1] = -value
        assert same_bits(added(x).rounded(), exact_sum([value * 4] * (MOST // 2) + [value] * 3))
    x = np.random.default_rng(2).standard_normal(3 * MOST)
    x[MOST + 1] = 1e300
    assert added(x).rounded() == by_fractions(x)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *product(["f2", "f4", "f8", ">f8", "c8", "c16", "i8", "?"], [(5,), (3, 4, 5)]),
        *product(["f8", "c16"], [(2, 1, MOST + 3)]),
    ],
)
def test_cells(dtype: str, shape: tuple[int, ...]) -> None:
    rng, n = np.random.default_rng(3), 2 * math.prod(shape)
    a, b = (rng.standard_normal(n) * 9 for _ in range(2))
    if np.dtype(dtype).kind == "c":
        a, b = a.view("c16"), b.view("c16")
    a, b = (x[: math.prod(shape)].astype(dtype).reshape(shape)[..., ::-1] for x in (a, b))

    def found(name: str, *cells: np.ndarray) -> float | complex:
        parts = [part.rounded() for part in exact_sums(name, *cells)]
        return np.complex128(complex(*parts)) if len(parts) == 2 else np.float64(parts[0])

    assert same_bits(np.sqrt(found("norm", a)), norm(a))
    assert same_bits(found("dot", a, b), products(a, b))
    if np.dtype(dtype).kind in "fc":
        assert same_bits(found("sum", a), sums(a))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 3, 17])
def test_elements_of_arrays(kind: str, ranks: int) -> None:
    values = hard(kind, 60 * ranks, np.random.default_rng(ranks)).reshape(ranks, 60)
    wanted = [exact_sum(column) for column in values.T]
    for order in (slice(None), slice(None, None, -1)):
        arrays = [each.copy() for each in values[order]]
        fold_exactly(arrays[0], arrays)
        assert all(map(same_bits, arrays[0], wanted))
