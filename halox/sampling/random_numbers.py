"""Random fields from a counter-based generator: each number depends on the seed and on its place in the whole field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from halox.collectives.host.cell_sums import BLOCK, blocks
from halox.decomposition import FieldLayout
from halox.domain import Domain, FieldOptions
from halox.domain.options import fixed_dtype
from halox.errors import FieldError
from halox.values import as_int, shown

DISTRIBUTIONS = ("uniform", "normal")

_ON_GPU = 1 << 22  # numbers at a time, as memory for 64-bit words is needed
_LOW = 0xFFFFFFFF


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """Return four words of 32 random bits for a counter of four words and a key of two: Philox4x32-10.

    The words are arrays of uint64 of NumPy or CuPy, or integers.

    References
    ----------
    J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw: Parallel random numbers: as easy as 1, 2, 3, SC 2011, section
    3.3; the constants and the test vector are those of Random123.

    Examples
    --------
    >>> [hex(word) for word in philox((0, 0, 0, 0), (0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    a, b, c, d = counter
    for number in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (
            (second >> 32) ^ b ^ (key[0] + number * 0x9E3779B9 & _LOW),
            second & _LOW,
            (first >> 32) ^ d ^ (key[1] + number * 0xBB67AE85 & _LOW),
            first & _LOW,
        )
    return a, b, c, d


def random_field(
    domain: Domain, seed: object, dist: str, dtype: npt.DTypeLike, options: FieldOptions
) -> Any:
    """Return a new field, as `halox.Grid.random` describes it; collective."""

    def check() -> tuple[int, Mapping[str, object]]:
        number, kind = as_int(seed), fixed_dtype(dtype)
        if number is None or not 0 <= number < 1 << 64:
            raise FieldError(f"seed must be an int from 0 to 2**64 - 1, got {shown(seed)}")
        if not isinstance(dist, str) or dist not in DISTRIBUTIONS:
            raise FieldError(
                f"dist must be one of {', '.join(map(repr, DISTRIBUTIONS))}, got {shown(dist)}"
            )
        if kind.str[1:] not in ("f4", "f8", "c8", "c16"):
            raise FieldError(
                f"dtype {kind} has no random numbers; use 'f4', 'f8', 'c8' or 'c16', and convert with astype"
            )
        layout = domain.layouts.of_options(options).spec.without_boundary
        return number, {"seed": number, "dist": dist, "dtype": str(kind), "layout": str(layout)}

    world = domain.world
    with world.guard:
        world.begin("random")
        key, of_all = world.prepare(check, "making a random field")
        world.check_alike(of_all)
        field: Any = domain.allocation.new(dtype, options)
        _fill(domain, field, domain.layouts.find(field), key, dist)
    return field


def _fill(domain: Domain, field: Any, layout: FieldLayout, seed: int, dist: str) -> None:
    """Fill all points, each by its flat index in the whole field; a halo wraps around the grid."""
    xp, shape, spec = domain.xp, layout.global_shape, layout.spec
    ranges = [range(extent) for extent in shape]
    first = len(spec.components_before)
    ranges[first : first + spec.ndim] = [range(cut.start, cut.stop) for cut in layout.stored]
    steps = np.append(np.cumprod(shape[:0:-1])[::-1], 1)
    along = [
        xp.asarray((np.array(cells) % extent * step).astype("u8"))
        for cells, extent, step in zip(ranges, shape, steps, strict=True)
    ]
    for block in blocks(field.shape, BLOCK if domain.device_id is None else _ON_GPU):
        cuts = [slice(n, n + 1) if isinstance(n, int) else n for n in block]
        cuts += [slice(None)] * (len(shape) - len(cuts))
        number = sum(xp.ix_(*(each[cut] for each, cut in zip(along, cuts, strict=True))))
        field[tuple(cuts)] = _numbers(xp, number, seed, dist, field.dtype)


def _numbers(xp: Any, number: Any, seed: int, dist: str, dtype: Any) -> Any:
    words = philox((number & _LOW, number >> 32, 0, 0), (seed & _LOW, seed >> 32))
    # 53 bits each, of which float32 keeps 24: all numbers are below 1.
    pair = [(words[n] >> 5 << 26) + (words[n + 1] >> 6) for n in (0, 2)]
    if dist == "uniform":
        bits = 24 if dtype.itemsize == (8 if dtype.kind == "c" else 4) else 53
        real, imaginary = ((x >> 53 - bits) * 0.5**bits for x in pair)
    else:
        u, v = (x * 0.5**53 for x in pair)
        radius, angle = xp.sqrt(-2 * xp.log1p(-u)), 2 * np.pi * v
        real, imaginary = radius * xp.cos(angle), radius * xp.sin(angle)
    return real if dtype.kind == "f" else real + 1j * imaginary
