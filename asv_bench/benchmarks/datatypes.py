"""Commit time of datatypes: from the constructor to the canonical layout and the signature."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from halox import datatypes


def x_face() -> datatypes.Datatype:
    return datatypes.subarray((258, 258, 258), (256, 256, 1), (1, 1, 1), "f8")


def nested_vectors() -> datatypes.Datatype:
    inner = datatypes.vector(64, 1, 66, "f8")
    return datatypes.hvector(64, 1, 66 * 66 * 8, datatypes.hvector(3, 1, 1 << 24, inner))


def lower_triangle() -> datatypes.Datatype:
    n = 1000
    columns = np.arange(n)
    return datatypes.indexed(n - columns, columns * (n + 1), "f8")


def regular_indexed() -> datatypes.Datatype:
    return datatypes.indexed_block(2, np.arange(0, 40_000, 4), "f4")


def particles() -> datatypes.Datatype:
    particle = np.dtype([("position", "f8", 3), ("charge", "f4"), ("kind", "i2")], align=True)
    return datatypes.indexed_block(1, np.arange(0, 3000, 3) ** 2 % 9973, particle)


TYPES: dict[str, Callable[[], datatypes.Datatype]] = {
    build.__name__: build
    for build in (x_face, nested_vectors, lower_triangle, regular_indexed, particles)
}


class Commit:
    """Builds a type anew each time."""

    params = (list(TYPES),)
    param_names = ("type",)

    def time_commit(self, name: str) -> None:
        datatype = TYPES[name]()
        if datatype.strided is None:
            datatype.blocks()
        _ = datatype.signature

    def track_blocks(self, name: str) -> int:
        return len(TYPES[name]().blocks().offsets)

    track_blocks.unit = "blocks"  # type: ignore[attr-defined]
