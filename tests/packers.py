"""One suite for all packers, over one table of datatypes; NumPy indexing with the datatype's definition is the oracle.

`PackerTests` has the tests. A subclass defines the fixture ``backend``, an object as `Backend` describes it:
``tests/unit/packing/test_packers.py`` for the host packer, for kernels compiled by g++ and for copies by a stand-in
driver, and ``tests/gpu/test_packers_gpu.py`` for the packers on a GPU.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from halox import datatypes as dt
from halox.datatypes import Datatype
from halox.errors import DatatypeError
from tests.datatype_strategies import build, recipes, scattered
from tests.support import trials

GUARD = 0xA5
HALF = 1 << 17
"""Bytes on either side of displacement 0 that the types of the tests stay within."""


class Memory(Protocol):
    """Bytes between guard bytes, at a known distance from a multiple of 256."""

    @property
    def pointer(self) -> int: ...

    def get(self) -> np.ndarray:
        """Check the guards, and return the bytes."""


class Packer(Protocol):
    """Packs items whose displacement 0 is byte ``origin`` of an array."""

    def pack(self, array: Any, origin: int, packed: Any) -> None: ...

    def unpack(self, packed: Any, array: Any, origin: int) -> None: ...


class Backend(Protocol):
    """A packer class, and the memory that it packs."""

    method: str

    def memory(self, values: np.ndarray, offset: int = 0) -> Memory:
        """Copy bytes to new memory, ``offset`` bytes from a multiple of 256."""

    def packer(self, datatype: Datatype, count: int, max_blocks: int | None = None) -> Packer:
        """Make a packer; `DatatypeError` if it does not take the datatype."""


def coded(nbytes: int, seed: int = 0) -> np.ndarray:
    """Return bytes that vary and never equal the guard."""
    return np.random.default_rng(seed).integers(0, GUARD, nbytes, np.uint8)


def displacements(datatype: Datatype, count: int = 1) -> np.ndarray:
    """Return the displacement of every byte of ``count`` items in packed order, by the definitions of MPI's standard.

    Only the constructors, their arguments and the extents of the old types are read, never a form derived from them.
    """
    return _shifted(_item(datatype), np.arange(count) * datatype.extent)


def _shifted(places: np.ndarray, shifts: Any) -> np.ndarray:
    return (np.asarray(shifts, np.int64).reshape(-1, 1) + places).ravel()


@cache
def _item(datatype: Datatype) -> np.ndarray:
    name, arguments = datatype.constructor, datatype.arguments
    if name == "primitive":
        return np.arange(datatype.size)
    items = [_item(old) for old in datatype.olds]
    if name == "struct":
        lengths, starts = arguments
        of_parts = zip(lengths, starts, datatype.olds, items, strict=True)
        parts = [_shifted(item, s + np.arange(n) * old.extent) for n, s, old, item in of_parts]
        return np.concatenate([np.zeros(0, np.int64), *parts])
    (item,), extent = items, datatype.olds[0].extent
    unit = 1 if name.startswith("h") else extent
    if name in ("resized", "dup"):
        return item
    if name == "contiguous":
        starts: Any = np.arange(arguments[0]) * extent
    elif name in ("vector", "hvector"):
        count, length, stride = arguments
        starts = np.arange(count)[:, None] * stride * unit + np.arange(length) * extent
    elif name in ("indexed", "hindexed"):
        lengths, places = (np.asarray(numbers, np.int64) for numbers in arguments)
        ends = np.cumsum(lengths)
        within = np.arange(lengths.sum()) - np.repeat(ends - lengths, lengths)
        starts = np.repeat(places * unit, lengths) + within * extent
    elif name in ("indexed_block", "hindexed_block"):
        length, places = arguments
        starts = np.asarray(places, np.int64)[:, None] * unit + np.arange(length) * extent
    else:
        assert name == "subarray"
        sizes, subsizes, first, order = arguments
        numbers = np.arange(np.prod(sizes)).reshape(sizes, order=order)
        box = tuple(slice(a, a + n) for a, n in zip(first, subsizes, strict=True))
        starts = numbers[box].ravel(order=order) * extent
    return _shifted(item, starts)


_RNG = np.random.default_rng(7)
_LINE = dt.vector(3, 1, 2, "f4")
LIST = dt.indexed([1, 2, 4], [0, 5, -9], "f8")


def _mix(lengths: Any, word: int = 1) -> Datatype:
    """Return blocks of given lengths at random places, at multiples of ``word`` bytes if all lengths are."""
    return scattered(_RNG, lengths, word, gap=9)[0]


def _box(
    shape: tuple[int, ...], starts: tuple[int, ...], n: tuple[int, ...], dtype: Any, *order: str
) -> Datatype:
    return dt.subarray(shape, n, starts, dtype, *order)  # type: ignore[arg-type]


MIXES = {
    "short of 8": _mix(_RNG.integers(1, 40, 300) * 8, 8),
    "short of 4": _mix(_RNG.integers(1, 60, 300) * 4, 4),
    "odd lengths": _mix(_RNG.integers(1, 300, 200)),
    "long and short": _mix(np.where(_RNG.random(40) < 0.1, _RNG.integers(1, 9000, 40), 7)),
    "long of 16": _mix(_RNG.integers(30, 150, 40) * 16, 16),
    "granules": _mix(_RNG.choice([4, 8, 24], 500), 4),
    "one to three bytes": _mix(_RNG.integers(1, 4, 500)),
    "alike, 8": _mix(np.full(1024, 8), 8),
    "alike, 7": _mix(np.full(500, 7)),
    "alike, 12": _mix(np.full(500, 12), 4),
    "alike, 1001": _mix(np.full(20, 1001)),
    "alike, 4096": _mix(np.full(10, 4096), 16),
    "two lengths": _mix(_RNG.choice([128, 256], 100), 16),
    "stretches of equal lengths": _mix(np.repeat([24, 8, 4, 100], [50, 60, 70, 5]), 4),
}
"""Lists of blocks of many lengths at random places."""

TYPES = {
    "one number": dt.primitive("f8"),
    "one byte": dt.primitive("u1"),
    "contiguous": dt.contiguous(1001, "f4"),
    "contiguous of list": dt.contiguous(50, LIST),
    "rows": dt.vector(200, 3, 5, "f4"),
    "rows backwards": dt.vector(200, 3, -5, "f4"),
    "rows of 16 bytes": dt.vector(100, 4, 10, "f8"),
    "pairs": dt.vector(150, 1, 3, "u2"),
    "bytes": dt.vector(300, 1, 3, "u1"),
    "long rows of bytes": dt.vector(3, 3001, 3003, "u1"),
    "rows of 31, 33 and 1025 bytes": dt.struct(
        [1, 1, 1], [0, 1001, 9007], [dt.vector(7, n, n + 2, "u1") for n in (31, 33, 1025)]
    ),
    "vector of list": dt.vector(4, 2, 3, LIST),
    "hvector": dt.hvector(200, 3, 13, "f4"),
    "hvector of list": dt.hvector(20, 2, 1000, LIST),
    "stride 0": dt.hvector(5, 1, 0, LIST),
    "overlapping rows": dt.hvector(100, 3, 16, "f8"),
    "slices backwards": dt.hvector(10, 1, -400, dt.vector(10, 1, 3, "f8")),
    "slices apart": dt.hvector(9, 1, 1001, dt.vector(20, 2, 5, "f8")),
    "transposed": dt.hvector(30, 1, 8, dt.vector(40, 1, 30, "f8")),
    "x-face": _box((20, 21, 22), (0, 0, 21), (20, 21, 1), "f8"),
    "y-face": _box((20, 21, 22), (0, 3, 0), (20, 1, 22), "f8"),
    "one cell": _box((3, 3, 3), (1, 1, 1), (1, 1, 1), "f4"),
    "structures": _box((7, 9), (0, 8), (7, 1), np.dtype([("a", "f8"), ("b", "i4")])),
    "three bytes each": _box((5, 6, 7), (1, 2, 3), (3, 3, 3), np.dtype("S3")),
    "box": _box((12, 13, 14), (1, 2, 3), (9, 8, 7), "f8"),
    "box, Fortran's order": _box((12, 13, 14), (1, 2, 3), (9, 8, 7), "f4", "F"),
    "four axes": _box((5, 6, 7, 8), (1, 1, 1, 1), (3, 4, 5, 6), "f4"),
    "seven axes": _box((3, 4, 3, 4, 3, 4, 3), (0,) * 7, (2, 3, 2, 3, 2, 3, 2), "f2"),
    "nine axes": _box((3,) * 9, (0,) * 9, (2,) * 9, "u1"),
    "box of lists": _box((4, 5), (1, 1), (2, 3), LIST),
    "box of lists, Fortran's order": _box((4, 5), (1, 1), (2, 3), LIST, "F"),
    "list": dt.indexed([1, 5, 2, 9], [0, 40, -7, 100], "f4"),
    "indexed": dt.indexed(_RNG.integers(0, 9, 500), np.arange(500) * 20, "f4"),
    "hindexed": dt.hindexed(_RNG.integers(0, 9, 500), np.arange(500) * 37, "f4"),
    "indexed over vector": dt.indexed([3, 1, 5], [0, 7, 20], dt.vector(3, 1, 2, "i2")),
    "indexed_block": dt.indexed_block(3, _RNG.permutation(900)[:600] * 4, "f8"),
    "hindexed_block": dt.hindexed_block(3, _RNG.integers(-20000, 20000, 1000), "u1"),
    "indexed_block over list": dt.indexed_block(2, [0, 9, 4], LIST),
    "zero lengths": dt.indexed([0, 2, 0, 3, 0], [5, 0, 1, 9, 2], "f4"),
    "overlapping list": dt.indexed([4, 4, 3], [0, 2, 1], "f8"),
    "a few long blocks among short ones": dt.hindexed(
        [9001, *[1] * 500, 7, 9000], np.cumsum([0, 9004, *[4] * 499, 4, 10]), "u1"
    ),
    "struct": dt.struct([1, 2, 3], [0, 40, 400], [LIST, _LINE, "i1"]),
    "struct of structs": dt.struct(
        [2, 1],
        [0, 2000],
        [
            dt.struct([1, 30], [0, 300], [LIST, _LINE]),
            dt.struct([20, 3], [0, 9000], [_LINE, dt.indexed([9, 70], [1, 50], "f4")]),
        ],
    ),
    "many branches": dt.struct(
        [1] * 500,
        _RNG.permutation(500) * 200,
        [dt.vector(2 + i % 40, 1, 2, "u1") for i in range(500)],
    ),
    "400 different branches": dt.struct(
        [1] * 400, _RNG.permutation(400) * 300, [dt.hvector(2, 1, 2 + i, "u1") for i in range(400)]
    ),
    "two branches 700 times": dt.struct(
        [1] * 1400,
        _RNG.permutation(1400) * 7,
        [dt.vector(2, 1, 2, "u1"), dt.vector(3, 1, 2, "u1")] * 700,
    ),
    "structured dtype": dt.as_datatype(
        np.dtype([("a", "u1"), ("b", "f8", (3,)), ("c", [("x", "f4"), ("y", "i2")])], align=True)
    ),
    "empty children": dt.struct([1, 1, 2], [0, 8, 64], [dt.contiguous(0, "f8"), LIST, _LINE]),
    "nothing": dt.indexed([0, 0], [1, 2], "f4"),
    "negative extent": dt.contiguous(4, dt.resized(LIST, 0, -160)),
    "resized": dt.resized(LIST, -8, 24),
    "dup": dt.dup(dt.dup(LIST)),
    **MIXES,
}

ALIGNED = ("rows", "bytes", "x-face", "indexed_block", "odd lengths", "granules", "struct")
CAPPED = ("rows", "long rows of bytes", "indexed", "many branches", "long and short")


def items(*counts: int) -> list[tuple[str, int]]:
    """Return names of types with numbers of items that the arrays of the tests hold."""
    return [
        (name, count)
        for name, datatype in TYPES.items()
        for count in counts
        if max(map(abs, datatype.reach(count))) < HALF
    ]


def check(
    backend: Backend,
    datatype: Datatype,
    count: int = 1,
    *,
    at: int = 0,
    to: int = 0,
    max_blocks: int | None = None,
) -> None:
    """Pack, and unpack unless bytes overlap, between addresses of any alignment, and compare with NumPy's indexing."""
    origin, nbytes = memory_of(datatype, count)
    places = origin + displacements(datatype, count)
    try:
        packer = backend.packer(datatype, count, max_blocks)
    except DatatypeError:
        assert backend.method in ("strided", "copy_engine"), "all others take every type"
        return
    host = coded(nbytes)
    array, packed = backend.memory(host, at), backend.memory(np.full(places.size, GUARD, "u1"), to)
    packer.pack(array, origin, packed)
    np.testing.assert_array_equal(packed.get(), host[places])
    np.testing.assert_array_equal(array.get(), host)
    if np.unique(places).size < places.size:
        return
    arriving, wanted = coded(places.size, 1), np.full(nbytes, GUARD, np.uint8)
    target = backend.memory(wanted, at)
    wanted[places] = arriving
    packer.unpack(backend.memory(arriving, to), target, origin)
    np.testing.assert_array_equal(target.get(), wanted)


def memory_of(datatype: Datatype, count: int) -> tuple[int, int]:
    """Return the index of displacement 0, a multiple of 256, in memory for some items, and the bytes of the memory."""
    low, high = datatype.reach(count)
    origin = 256 - min(low, 0) // 256 * 256
    return origin, origin + max(high, 0) + 256


class PackerTests:
    """The tests; ``backend`` is a fixture of the subclass, of scope "class" or wider."""

    @pytest.mark.parametrize(("name", "count"), items(1, 3))
    def test_packs_and_unpacks(self, backend, name, count):
        check(backend, TYPES[name], count)

    @pytest.mark.parametrize(
        ("at", "to"), [(0, 1), (0, 8), (1, 0), (1, 3), (2, 0), (4, 8), (5, 5), (8, 8), (12, 2)]
    )
    @pytest.mark.parametrize("name", ALIGNED)
    def test_any_alignment(self, backend, name, at, to):
        check(backend, TYPES[name], at=at, to=to)

    @pytest.mark.parametrize("max_blocks", [1, 2, 7, 100_000])
    @pytest.mark.parametrize("name", CAPPED)
    def test_any_number_of_blocks(self, backend, name, max_blocks):
        check(backend, TYPES[name], max_blocks=max_blocks)

    @settings(max_examples=trials(160), suppress_health_check=list(HealthCheck), deadline=None)
    @given(
        recipes(),
        st.integers(0, 3),
        st.integers(0, 15),
        st.integers(0, 15),
        st.sampled_from([None, None, 1, 5]),
    )
    def test_random_types(self, backend, recipe, count, at, to, max_blocks):
        datatype = build(recipe)
        assume(datatype.size or count > 2)
        check(backend, datatype, count, at=at, to=to, max_blocks=max_blocks)

    @pytest.mark.parametrize("name", ["rows", "box", "list", "struct"])
    def test_a_packer_serves_any_arrays(self, backend, name):
        """Tables of an earlier call must not keep its addresses or its alignment."""
        datatype = TYPES[name]
        (origin, nbytes), packer = memory_of(datatype, 1), backend.packer(datatype, 1)
        places = origin + displacements(datatype)
        for seed, (at, to) in enumerate([(0, 0), (16, 8), (4, 0), (3, 1), (0, 0)]):
            host = coded(nbytes, seed)
            packed = backend.memory(np.full(places.size, GUARD, "u1"), to)
            packer.pack(backend.memory(host, at), origin, packed)
            np.testing.assert_array_equal(packed.get(), host[places])
