"""Benchmark patterns defined by their geometry: vectors, boxes, triangles, lists, structs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from halox import datatypes as dt
from halox_bench.common.layouts import Box, Gather, Gathers, Records, Triangle
from halox_bench.common.options import KIB, MIB, size_label
from halox_bench.pack.patterns import Case, Pattern, of_box

PAYLOADS = (64 * KIB, MIB, 64 * MIB)
LARGEST = 256 * MIB
BLOCKS = (8, 16, 32, 64, 128, 256, 512, KIB, 2 * KIB, 4 * KIB, 8 * KIB, 16 * KIB)

LIST_LENGTH = 1024
LIST_SPANS = {"dense": 1178, "sparse": 65536}
"""Elements out of which a list of 1024 is drawn: 1.15 Ki, as dense as LAMMPS's; 64 Ki."""

HYPERCUBE = 64
"""Edge of the volume out of which a hypercube is cut."""


def contiguous() -> Iterator[Case]:
    """Yield one run: the upper bound for all others."""
    for payload in (*PAYLOADS, LARGEST):
        build = partial(dt.contiguous, payload // 8, "f8")
        yield of_box("contiguous", size_label(payload), payload, build, Box(payload))


def runs(pattern: str, block: int, stride: int, payload: int) -> Case:
    """Return equal runs at one stride; the pattern's name selects the datatype's constructor."""
    n = payload // block
    size = f"{size_label(block)}-{size_label(payload)}"
    built = {"indexed": _indexed, "indexed_block": _indexed_block}.get(pattern, _vector)
    box = Box(block, (n,), (stride,))
    return of_box(pattern, size, n * stride, partial(built, n, block, stride), box)


def _vector(n: int, block: int, stride: int) -> dt.Datatype:
    return dt.vector(n, block // 8, stride // 8, "f8")


def _indexed(n: int, block: int, stride: int) -> dt.Datatype:
    return dt.hindexed(np.full(n, block // 8), np.arange(n) * stride, "f8")


def _indexed_block(n: int, block: int, stride: int) -> dt.Datatype:
    return dt.indexed_block(block // 8, np.arange(n) * (stride // 8), "f8")


def vector() -> Iterator[Case]:
    """Yield runs of 8 bytes to 16 KiB, twice their length apart."""
    for block in BLOCKS:
        for payload in PAYLOADS:
            yield runs("vector", block, 2 * block, payload)
    for block in (128, KIB):
        yield runs("vector", block, 2 * block, LARGEST)


def vector_512() -> Iterator[Case]:
    """Yield runs 512 bytes apart, as long as they fit in there."""
    for block in (block for block in BLOCKS if block < 512):
        for payload in PAYLOADS:
            yield runs("vector_512", block, 512, payload)


def indexed() -> Iterator[Case]:
    """Yield the vector's runs as a list of lengths and displacements."""
    for block in (8, 128, KIB):
        for payload in PAYLOADS:
            yield runs("indexed", block, 2 * block, payload)


def indexed_block() -> Iterator[Case]:
    """Yield the vector's runs as a list of displacements."""
    for block in (8, 128, KIB):
        for payload in PAYLOADS:
            yield runs("indexed_block", block, 2 * block, payload)


def hypercube() -> Iterator[Case]:
    """Yield the first elements along all four axes of a float64 volume."""
    n = HYPERCUBE
    for edge in (2, 4, 8, 16, 32, 64):
        box = Box(8 * edge, (edge,) * 3, tuple(8 * n**axis for axis in (3, 2, 1)))
        build = partial(dt.subarray, (n,) * 4, (edge,) * 4, (0,) * 4, "f8")
        yield of_box("hypercube", edge, 8 * n**4, build, box)


def triangle(pattern: str, *, lower: bool) -> Iterator[Case]:
    """Yield a triangle of an n x n float64 matrix by columns."""
    for n in (1024, 2048, 4096, 8192):

        def build(_: Sequence[int], n: int = n) -> dt.Datatype:
            column = np.arange(n)
            if lower:
                return dt.indexed(n - column, column * n + column, "f8")
            return dt.indexed(column + 1, column * n, "f8")

        by_hand = Triangle(n, lower)
        yield Case(pattern, str(n), (8 * n * n,), build, 4 * n * (n + 1), by_hand=by_hand)


def random_indexed() -> Iterator[Case]:
    """Yield a list of 1024 distinct 8-byte elements in random order, repeated by the count."""
    for density, span in LIST_SPANS.items():
        index = np.random.default_rng(span).permutation(span)[:LIST_LENGTH].astype(np.int64)
        for payload in PAYLOADS:
            count = payload // (8 * LIST_LENGTH)
            yield Case(
                "random_indexed",
                f"{density}-{size_label(payload)}",
                (8 * span * count,),
                lambda _, index=index, span=span: dt.resized(  # type: ignore[misc]
                    dt.indexed_block(1, index, "f8"), 0, 8 * span
                ),
                payload,
                count,
                by_hand=Gathers((Gather(index, 8, count, 8 * span),)),
            )


def struct_24() -> Iterator[Case]:
    """Yield a double, two ints and a char, padded to 24 bytes; 17 of them are packed."""
    for count in (4 * KIB, 64 * KIB, 4 * MIB):
        yield Case(
            "struct_24",
            str(count),
            (24 * count,),
            lambda _: dt.struct([1, 2, 1], [0, 8, 16], ["f8", "i4", "i1"]),
            17 * count,
            count,
            by_hand=Records(count),
            block_bytes=17,
        )


JENKINS = "Jenkins et al. 2013, 4.1"
WU = "Wu et al. 2016, 5.1"

PATTERNS = (
    Pattern("contiguous", "one run of bytes", contiguous, ("1MiB", "64MiB"), JENKINS),
    Pattern(
        "vector",
        "runs of 8 B to 16 KiB, twice their length apart",
        vector,
        ("8B-1MiB", "128B-1MiB", "128B-64MiB", "4KiB-1MiB"),
        WU,
    ),
    Pattern("vector_512", "runs 512 B apart", vector_512, ("8B-1MiB",), JENKINS),
    Pattern("hypercube", "4D box out of 64^4 float64", hypercube, ("16",), JENKINS),
    Pattern(
        "lower_triangle",
        "lower triangle of a float64 matrix by columns",
        lambda: triangle("lower_triangle", lower=True),
        ("1024",),
        WU,
    ),
    Pattern(
        "upper_triangle",
        "upper triangle of a float64 matrix by columns",
        lambda: triangle("upper_triangle", lower=False),
        ("1024",),
        WU,
    ),
    Pattern("indexed", "the vector's runs as a list", indexed, ("128B-1MiB",), JENKINS),
    Pattern(
        "indexed_block",
        "the vector's runs as a list of places",
        indexed_block,
        ("8B-1MiB",),
        JENKINS,
    ),
    Pattern(
        "random_indexed",
        "lists of 1024 8-byte elements in random order, out of 1.15 Ki or 64 Ki",
        random_indexed,
        ("dense-1MiB", "sparse-1MiB"),
    ),
    Pattern("struct_24", "24-byte structs with 7 bytes of padding", struct_24, ("65536",), JENKINS),
)
