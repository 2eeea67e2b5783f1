"""Random fields from a counter-based generator: each number depends on the seed and on its place in the whole field."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from halox.decomposition import FieldLayout
from halox.domain import Domain, FieldOptions
from halox.domain.options import fixed_dtype
from halox.errors import DeviceError, FieldError
from halox.reductions.operations import check_writable
from halox.runtime.arrays import Array, DType, as_ndarray, describe
from halox.runtime.gpu.compiler import kernel
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.devices import as_device_array
from halox.runtime.gpu.launch import PreparedLaunch
from halox.values import as_int, shown

DISTRIBUTIONS = ("uniform", "normal")

_BLOCK = 1 << 15  # numbers at a time on the host, whose buffers stay in the cache
_THREADS, _LEAST_COLUMNS = 64, 64
_LOW = 0xFFFFFFFF
_FACTORS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_LOW_HALF = 0 if sys.byteorder == "little" else 1


class _Buffers:
    """Memory for the rounds of a number of counters."""

    def __init__(self, size: int) -> None:
        self.products = np.empty((2, 2, size), "u8")
        self.words = np.zeros((2, size), "u8")  # rounds write the lower halves only


def philox(
    counter: Sequence[Any], key: tuple[int, int], buffers: _Buffers | None = None, *, pairs: int = 2
) -> tuple[Any, Any, Any, Any]:
    """Return four words of 32 random bits for a counter of four words and a key of two: Philox4x32-10.

    Words are integers, or 1D arrays of uint64 of one length. Arrays of results use the memory of the buffers; only the
    lower halves of their elements count. With ``pairs=1`` only the first two words are valid.

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
    if buffers is None:
        buffers = _Buffers(max(np.size(word) for word in counter))
    # A product's upper half makes the other word of this round, and its lower half the other word of the next round.
    words, products = [a, c], [d, b]
    for number in range(10):
        before, products = products, [0, 0]
        is_last = pairs == 1 and number >= 8  # makes the word that the first pair needs
        for n in (1,) if is_last and number == 9 else (0, 1):
            products[n] = _times(words[n], _FACTORS[n], buffers.products[number % 2, n])
            if number % 2 == 0:  # the keys of this round and of the next one
                this, after = (
                    key[1 - n] + m * _KEY_STEPS[1 - n] & _LOW for m in (number, number + 1)
                )
                products[n] ^= this << 32 | after
        for n in (number - 8,) if is_last else (0, 1):
            words[1 - n] = _mixed(products[n], before[n], buffers.words[1 - n])
    found = words[0], products[1], words[1], products[0]
    a, b, c, d = (word & _LOW if isinstance(word, int) else word for word in found)
    return a, b, c, d


def _times(word: Any, factor: int, out: Array) -> Any:
    if isinstance(word, int):
        return word * factor
    return np.multiply(word, factor, out=out[: len(word)])


def _mixed(product: Any, before: Any, out: Array) -> Any:
    """Return the exclusive or of a product's upper half and the lower half of the product of the round before."""
    high = product >> 32 if isinstance(product, int) else product.view("u4")[1 - _LOW_HALF :: 2]
    low = _lower(before)
    if isinstance(product, int) and isinstance(before, int):
        return high ^ low
    out = out[: len(before if isinstance(product, int) else product)]
    np.bitwise_xor(high, low, out=_lower(out))
    return out


def _lower(words: Any) -> Any:
    return words & _LOW if isinstance(words, int) else words.view("u4")[_LOW_HALF::2]


def random_field(
    domain: Domain,
    seed: object,
    dist: str,
    dtype: npt.DTypeLike | None,
    out: object,
    options: FieldOptions,
) -> Any:
    """Return a field of random numbers, as `halox.Grid.random` describes it; collective."""

    def check() -> tuple[tuple[int, npt.DTypeLike], Mapping[str, object]]:
        number = as_int(seed)
        if number is None or not 0 <= number < 1 << 64:
            raise FieldError(f"seed must be an int from 0 to 2**64 - 1, got {shown(seed)}")
        if not isinstance(dist, str) or dist not in DISTRIBUTIONS:
            raise FieldError(
                f"dist must be one of {', '.join(map(repr, DISTRIBUTIONS))}, got {shown(dist)}"
            )
        if out is None:
            kind = fixed_dtype("f8" if dtype is None else dtype)
            spec = domain.layouts.of_options(options).spec
        else:
            spec, kind = domain.layouts.find(out).spec, _out_dtype(domain, out)
            if dtype is not None or options:
                given = ", ".join(["dtype"] * (dtype is not None) + list(options))
                raise FieldError(f"out: it has a dtype and a layout; leave out {given}")
        if kind.str[1:] not in ("f4", "f8", "c8", "c16"):
            raise FieldError(
                f"dtype {kind} has no random numbers; use 'f4', 'f8', 'c8' or 'c16', and convert with astype"
            )
        layout = str(spec.without_boundary)
        alike = {"seed": number, "dist": dist, "dtype": str(kind), "layout": layout}
        return (number, kind), alike | {"out": "new" if out is None else "given"}

    world = domain.world
    with world.guard:
        world.begin("random")
        key, kind = world.attempt(check, "making a random field", alike=True)
        field: Any = domain.allocation.new(kind, options, "empty") if out is None else out
        _fill(domain, field, domain.layouts.find(field), key, dist)
    return field


def _out_dtype(domain: Domain, out: object) -> Any:
    described = describe(out, "out")
    if described.device != domain.device_id:
        raise DeviceError("out: it is not on the device of the grid's fields; allocate it there")
    check_writable(described)
    return described.dtype


def index_sums(layout: FieldLayout, xp: Any) -> tuple[Any, Any]:
    """Split the indices of all points of the array, in its order, into sums: one term a row, and one a column.

    The index of a point is its place in the flat whole field; a halo wraps around the grid.
    """
    shape, spec = layout.global_shape, layout.spec
    ranges = [range(extent) for extent in shape]
    ranges[spec.grid_slice] = [range(cut.start, cut.stop) for cut in layout.stored]
    along = [
        xp.asarray((np.array(cells) % extent * prod(shape[axis + 1 :])).astype("u8"))
        for axis, (cells, extent) in enumerate(zip(ranges, shape, strict=True))
    ]
    split = len(along) - 1
    while split and prod(map(len, along[split:])) < _LEAST_COLUMNS:
        split -= 1
    one = xp.zeros(1, "u8")  # so that no side is empty
    rows, columns = (sum(xp.ix_(one, *part)).reshape(-1) for part in (along[:split], along[split:]))
    return rows, columns


def _fill(domain: Domain, field: Any, layout: FieldLayout, seed: int, dist: str) -> None:
    """Fill all points: on the host in blocks of one size, on a GPU by one launch, which does not block."""
    device, xp = domain.device_id, domain.xp
    array: Any = as_ndarray(field) if device is None else as_device_array(field)
    target = array if array.flags.c_contiguous else xp.empty(array.shape, array.dtype)
    arguments = target, *index_sums(layout, xp), seed, dist
    if device is None:
        fill_on_host(*arguments)
    else:
        _fill_on_gpu(*arguments, device)
    if target is not array:
        array[...] = target


def fill_on_host(field: Array, rows: Array, columns: Array, seed: int, dist: str) -> None:
    """Fill a contiguous array, given the `index_sums` of its points."""
    cells = field.reshape(len(rows), len(columns))
    parts = [cells.real, cells.imag] if cells.dtype.kind == "c" else [cells]
    height = max(1, _BLOCK // len(columns))
    width = -(-len(columns) // -(-len(columns) // _BLOCK))
    scratch, buffers = np.empty((2, height * width), "u8"), _Buffers(height * width)
    key, is_large = (seed & _LOW, seed >> 32), bool(rows.max() + columns.max() > _LOW)
    for row, column in product(range(0, len(rows), height), range(0, len(columns), width)):
        at = slice(row, row + height), slice(column, column + width)
        targets = [part[at] for part in parts]
        mine = scratch[:, : targets[0].size]
        np.add(rows[at[0], None], columns[at[1]], out=mine[0].reshape(targets[0].shape))
        counter = (mine[0] & _LOW, mine[0] >> 32, 0, 0) if is_large else (mine[0], 0, 0, 0)
        if dist == "uniform":
            _put_uniform(targets, philox(counter, key, buffers, pairs=len(parts)), mine[0])
        else:
            _put_normal(targets, philox(counter, key, buffers), *mine)


def _put_uniform(targets: Sequence[Array], words: Sequence[Any], bits: Array) -> None:
    """Set real, and imaginary parts, from pairs of words; ``bits`` is scratch."""
    for target, high, low in zip(targets, words[::2], words[1::2], strict=False):
        is_single = target.dtype.itemsize == 4
        values = (high >> 8).view("i8") if is_single else _joined(high, low, bits)
        scale = 0.5**24 if is_single else 0.5**53
        np.multiply(values.reshape(target.shape), scale, out=target, casting="unsafe")


def _put_normal(
    targets: Sequence[Array], words: Sequence[Any], first: Array, second: Array
) -> None:
    """Set real, and imaginary parts, by Box-Muller; ``first`` and ``second`` are scratch."""
    a, b, c, d = words
    radius, angle, wave = first.view("f8"), b.view("f8"), d.view("f8")
    np.multiply(_joined(a, b, second), -(0.5**53), out=radius)
    np.sqrt(np.multiply(np.log1p(radius, out=radius), -2, out=radius), out=radius)
    np.multiply(_joined(c, d, second), 0.5**53, out=angle)
    np.multiply(angle, 2 * np.pi, out=angle)
    shape = targets[0].shape
    for target, function in zip(targets, (np.cos, np.sin), strict=False):
        values = function(angle, out=wave).reshape(shape)
        np.multiply(radius.reshape(shape), values, out=target, casting="unsafe")


def _joined(high: Array, low: Array, out: Array) -> Array:
    """Return 27 bits of one word and 26 of another, in ``out``; overwrites the second word."""
    np.left_shift(high, 26 - 5, out=out)
    np.bitwise_and(out, (1 << 53) - (1 << 26), out=out)
    np.right_shift(low, 6, out=low)
    np.bitwise_and(low, (1 << 26) - 1, out=low)
    return np.bitwise_or(out, low, out=out).view("i8")


def kernel_defines(dtype: DType, dist: str) -> tuple[tuple[str, str], ...]:
    """Return the ``#define``s of the kernel."""
    is_complex = dtype.kind == "c"
    is_single = dtype.itemsize == (8 if is_complex else 4)
    return (
        ("TYPE", "float" if is_single else "double"),
        ("COMPLEX", str(int(is_complex))),
        ("NORMAL", str(int(dist == "normal"))),
        ("SINGLE", str(int(is_single))),
    )


def _fill_on_gpu(field: Any, rows: Any, columns: Any, seed: int, dist: str, device: int) -> None:
    launch = PreparedLaunch(
        kernel("random_field", "random_field", device, kernel_defines(field.dtype, dist)),
        rows.size,
        _THREADS,
        [
            *(ctypes.c_uint64(each.data.ptr) for each in (field, rows, columns)),
            ctypes.c_uint32(columns.size),
            ctypes.c_uint64(seed),
        ],
        device=device,
    )
    launch.launch(cupy().cuda.get_current_stream().ptr)
