"""Datatypes with sizes near 2**63, where NumPy's integers overflow silently, and bounds of types without bytes."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from halox import datatypes as dt
from halox import pack, unpack
from halox.datatypes import Datatype
from halox.errors import DatatypeError, FieldError
from halox.packing.host import HostPacker

HUGE = 2**62
FAR = "reaches over [0-9]+ bytes, more than the 2\\*\\*63 - 1|must fit signed 64-bit"

BEYOND: dict[str, Callable[[], Datatype]] = {
    "indexed of far items": lambda: dt.indexed([5], [0], dt.resized("f8", 0, HUGE)),
    "indexed_block": lambda: dt.indexed_block(3, [1], dt.resized("f8", 0, HUGE)),
    "hindexed at both ends": lambda: dt.hindexed([1, 1], [-HUGE - 1, HUGE], "f8"),
    "hindexed_block": lambda: dt.hindexed_block(2**61, [0], "f8"),
    "contiguous": lambda: dt.contiguous(HUGE, "f8"),
    "vector": lambda: dt.vector(3, 1, HUGE, "f8"),
    "hvector": lambda: dt.hvector(5, 1, HUGE, "f8"),
    "struct": lambda: dt.struct([1, 1], [-HUGE - 1, HUGE], ["f8", "f4"]),
    "subarray": lambda: dt.subarray((2**32, 2**32), (1, 1), (2**32 - 1, 2**32 - 1), "f8"),
    "subarray of lists": lambda: dt.subarray(
        (2**32, 2**32), (1, 1), (2**32 - 1, 0), dt.indexed([1, 2], [0, 3], "f8")
    ),
    "slab": lambda: dt.slab((8, 8), (HUGE, 8), (3, 0), (1, 8), "f8"),
    "resized": lambda: dt.resized("f8", HUGE, HUGE),
    "irregular, repeated": lambda: dt.contiguous(2**60, dt.indexed([1, 2], [0, 3], "f8")),
}


@pytest.mark.parametrize("name", BEYOND)
def test_types_that_reach_beyond_64_bits_are_refused(name: str) -> None:
    with pytest.raises(DatatypeError, match=FAR):
        BEYOND[name]()


@pytest.mark.parametrize("count", [3, HUGE, 2**63 - 1])
def test_items_that_reach_beyond_64_bits_are_refused(count: int) -> None:
    array, packed = np.zeros(4), np.zeros(8, np.uint8)
    for item in (dt.resized("f8", 0, HUGE), dt.resized(dt.indexed([1, 1], [0, 2], "i2"), 0, HUGE)):
        for call in (
            lambda item=item: pack(array, item, count),
            lambda item=item: unpack(packed, item, array, count),
            lambda item=item: item.items(count),
            lambda item=item: item.overlaps(count),
        ):
            with pytest.raises(DatatypeError, match=FAR):
                call()


def test_types_just_inside_64_bits_are_described_exactly() -> None:
    ends = dt.hindexed([1, 1, 1], [-HUGE, 0, HUGE - 16], "f8")
    assert ends.blocks().offsets.tolist() == [-HUGE, 0, HUGE - 16]
    assert (ends.true_lb, ends.true_ub) == (-HUGE, HUGE - 8)
    far = dt.vector(2, 1, -(HUGE // 8), "f8")
    assert far.strided is not None and far.strided.strides == (-HUGE,)
    for made in (far, dt.hindexed([1], [HUGE], "f8"), dt.resized("f8", 0, HUGE)):
        with pytest.raises((FieldError, DatatypeError)):
            HostPacker(np.zeros(4), made, 2)


def test_more_blocks_than_any_memory_lists() -> None:
    many = dt.contiguous(2**40, dt.indexed([1, 2], [0, 3], "u1"))
    for call in (many.blocks, many.overlaps, dt.vector(2**40, 1, 2, "u1").blocks):
        with pytest.raises(DatatypeError):
            call()


def within(rng: random.Random) -> int:
    """Draw a number of either sign and any magnitude up to 2**62: a power of two, or one more or less."""
    return rng.choice((-1, 1)) * ((1 << rng.randint(0, 62)) + rng.randint(-1, 1))


def test_random_large_types_are_refused_or_exact() -> None:
    """A type is an error, or its blocks equal the result in Python's integers, which never overflow."""
    rng, exact = random.Random(5), 0
    for _ in range(800):
        lengths = [rng.choice((0, 1, 2, 5, abs(within(rng)))) for _ in range(rng.randint(1, 3))]
        places = [rng.choice((0, within(rng))) for _ in lengths]
        old = rng.choice((dt.as_datatype("i2"), dt.resized("i2", 0, within(rng))))
        try:
            made = dt.hindexed(lengths, places, old)
        except DatatypeError:
            continue
        if sum(lengths) > 100:
            assert made.size == 2 * sum(lengths) < 2**63
            continue
        wanted = [
            place + k * old.extent + byte
            for place, length in zip(places, lengths, strict=True)
            for k in range(length)
            for byte in (0, 1)
        ]
        blocks = made.blocks()
        found = [
            start + byte
            for start, length in zip(blocks.offsets.tolist(), blocks.lengths.tolist(), strict=True)
            for byte in range(length)
        ]
        assert found == wanted
        exact += bool(wanted)
    assert exact > 50


EMPTY = dt.contiguous(0, "f8")
BOUNDED = dt.resized(EMPTY, -8, 32)  # no bytes, from -8 to 24

# (lb, ub), by MPI's rules for lower and upper bound markers.
BOUNDS: dict[str, tuple[Datatype, tuple[int, int]]] = {
    "contiguous": (dt.contiguous(3, BOUNDED), (-8, 88)),
    "contiguous of none": (dt.contiguous(0, BOUNDED), (0, 0)),
    "contiguous without bounds": (dt.contiguous(3, EMPTY), (0, 0)),
    "vector": (dt.vector(2, 3, 5, BOUNDED), (-8, 248)),
    "vector of none": (dt.vector(3, 0, 5, BOUNDED), (0, 0)),
    "hvector": (dt.hvector(2, 3, 100, BOUNDED), (-8, 188)),
    "hvector without bounds": (dt.hvector(2, 3, 100, EMPTY), (0, 0)),
    "indexed": (dt.indexed([2, 0], [1, 50], BOUNDED), (24, 88)),
    "hindexed": (dt.hindexed([1, 2], [100, 200], BOUNDED), (92, 256)),
    "indexed_block": (dt.indexed_block(2, [1, 5], BOUNDED), (24, 216)),
    "hindexed_block": (dt.hindexed_block(1, [100, -100], BOUNDED), (-108, 124)),
    "struct": (dt.struct([1, 1], [100, 0], [BOUNDED, "f8"]), (92, 124)),
    "struct of two": (dt.struct([1, 1], [100, 50], [BOUNDED, BOUNDED]), (42, 124)),
    "subarray": (dt.subarray((4, 5), (2, 2), (1, 1), BOUNDED), (0, 640)),
    "dup": (dt.dup(BOUNDED), (-8, 24)),
    "nested": (dt.contiguous(2, dt.vector(2, 1, 2, BOUNDED)), (-8, 184)),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_explicit_bounds_of_types_without_bytes(name: str) -> None:
    made, bounds = BOUNDS[name]
    assert (made.lb, made.ub) == bounds
    assert (made.true_lb, made.true_ub) == (0, made.size)
    assert pack(np.zeros(20), made, 2).size == 2 * made.size
