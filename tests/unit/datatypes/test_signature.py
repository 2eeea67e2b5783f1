"""Signatures against the sequences of codes that they represent."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halox.datatypes import Signature, contiguous, indexed, struct, subarray, vector

CODES = ("<f8", "<i4", "|u1")

# An expression over sequences: a code, a repetition, or a concatenation.
expressions = st.recursive(
    st.sampled_from(CODES),
    lambda inner: st.one_of(
        st.tuples(st.just("repeat"), inner, st.integers(0, 5)),
        st.tuples(st.just("join"), st.lists(inner, max_size=4)),
    ),
    max_leaves=12,
)


def listed(expression: object) -> list[str]:
    if isinstance(expression, str):
        return [expression]
    kind, inner, *rest = expression  # type: ignore[misc]
    if kind == "repeat":
        return listed(inner) * rest[0]
    return list(itertools.chain.from_iterable(listed(part) for part in inner))


def signed(expression: object) -> Signature:
    if isinstance(expression, str):
        return Signature.of(expression)
    kind, inner, *rest = expression  # type: ignore[misc]
    if kind == "repeat":
        return signed(inner) * rest[0]
    return Signature.concatenated(signed(part) for part in inner)


@given(expressions)
def test_signature_is_a_function_of_the_sequence(expression: object) -> None:
    codes = listed(expression)
    signature = signed(expression)
    one_by_one = Signature()
    for code in codes:
        one_by_one = one_by_one + Signature.of(code)
    assert signature == one_by_one
    assert hash(signature) == hash(one_by_one)
    # Comparison ignores some attributes; they must agree, too.
    assert repr(signature) == repr(one_by_one)
    assert signature.power == one_by_one.power

    runs = [(code, len(list(group))) for code, group in itertools.groupby(codes)]
    assert signature.elements == len(codes)
    assert signature.n_runs == len(runs)
    assert list(signature.head) == runs[:3]
    assert signature.uniform == (np.dtype(runs[0][0]) if len(runs) == 1 else None)


@given(expressions, expressions)
def test_signatures_differ_where_sequences_do(one: object, other: object) -> None:
    assert (signed(one) == signed(other)) == (listed(one) == listed(other))


@pytest.mark.parametrize("count", [1, 2, 3, 2**20 - 1, 2**40])
def test_long_repetition_equals_its_halves(count: int) -> None:
    pair = Signature.of("<f8") + Signature.of("<i4")
    for one in (pair, Signature.of("<f8")):
        assert one * count + one * count == one * (2 * count)
        assert one * (count + 1) != one * count


def test_same_primitives_in_another_arrangement_have_the_same_signature() -> None:
    face = subarray((6, 6), (6, 2), (0, 1), "f8")
    assert face.signature == contiguous(12, "f8").signature == vector(3, 4, 7, "f8").signature
    assert face.signature != contiguous(12, "i8").signature
    pairs = struct([1, 1], [0, 8], ["f8", "i4"])
    assert indexed([2, 1], [0, 5], pairs).signature == contiguous(3, pairs).signature


def test_text() -> None:
    five = contiguous(5, struct([1, 2], [0, 8], ["f8", "i4"]))
    assert str(five.signature) == "f8 x 1, i4 x 2, f8 x 1, ... (3 of 10 runs)"
    assert str(contiguous(2, ">f8").signature) == ">f8 x 2"


def test_pickled_signatures_are_small_and_equal_in_another_process() -> None:
    signature = contiguous(10**9, struct([1, 2], [0, 8], ["f8", "i4"])).signature
    sent = pickle.dumps(signature)
    assert len(sent) < 500
    assert pickle.loads(sent) == signature
    program = (
        "from halox.datatypes import contiguous, struct;"
        "print(contiguous(10**9, struct([1, 2], [0, 8], ['f8', 'i4'])).signature.digest)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=500
    )
    assert int(answer.stdout) == signature.digest
