"""Fields on divided grids, and their arrays before and after an exchange, computed without halox.

Every value encodes its global point, component, field and round, so that a misplaced or stale cell has a wrong value.
Halos hold poison before an exchange. A map of indices says of which point each stored point is an image; fields at
walls are padded by `numpy.pad`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import halox
from tests.limits import read_in_place

Halo = tuple[tuple[int, int], ...]
Side = Any

RECORD = np.dtype([("a", "f8"), ("b", "i2"), ("c", "u1")], align=True)
DTYPES = ["f8", "f4", "f2", "c8", "c16", "i1", "u2", "i4", "i8", "?", "M8[s]", "S3", "g", RECORD]
NUMERIC = ["f8", "f4", "c16", "i4", "i8"]
MIRRORS = {"symmetric": 1, "antisymmetric": -1, "reflect": 1, "antireflect": -1}
CENTERS = {"T": (1, 1), "U": (0, 1), "V": (1, 0), "F": (0, 0)}
PLACES = ("low", "center", "high")


@dataclass
class Field:
    """The layout of a field; ``mine`` if the user allocates it, not the grid."""

    dtype: np.dtype[Any]
    halo: Halo
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    staggered: tuple[bool, ...] = ()
    parity: str | None = None
    offsets: tuple[int, ...] = ()
    sides: dict[tuple[int, ...], tuple[tuple[Side, Side], ...]] = field(default_factory=dict)
    sign: Any = 1
    position: tuple[str, ...] | None = None
    mine: bool = False

    def __post_init__(self) -> None:
        self.dtype = np.dtype(self.dtype)
        self.staggered = self.staggered or (False,) * len(self.halo)

    @property
    def all_sides(self) -> list[Side]:
        """Boundaries of all components and sides."""
        return [side for sides in self.sides.values() for pair in sides for side in pair]

    def options(self) -> dict[str, Any]:
        options = {
            "components": (*self.before, ..., *self.after) if self.after else self.before,
            "staggered": tuple(axis for axis, is_so in enumerate(self.staggered) if is_so),
            "parity": self.parity,
            "offsets": self.offsets,
            "boundary": self.sides,
            "sign": self.sign,
            "position": self.position,
        }
        given = {name: value for name, value in options.items() if value not in (None, (), {}, 1)}
        return {"halo": self.halo, **given}


@dataclass
class Case:
    """A grid in blocks of these sizes along each axis, its fields, and the way of its messages between ranks."""

    blocks: tuple[tuple[int, ...], ...]
    periodic: tuple[bool, ...]
    fields: list[Field]
    corners: bool = True
    connect: dict[Any, halox.Connection] = field(default_factory=dict)
    way: str = "packed"  # or "in place", as on large grids, or "MPI"
    order: tuple[int, ...] | None = None  # the rank of each block in C order
    axes: tuple[int, ...] | None = None  # the axes of an exchange along some
    weights: Any = None  # which give the blocks

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sum, self.blocks))

    @property
    def procs(self) -> tuple[int, ...]:
        return tuple(map(len, self.blocks))

    @property
    def fixed(self) -> list[int]:
        """The axes that an exchange leaves out."""
        return [n for n in range(len(self.shape)) if self.axes is not None and n not in self.axes]

    def options(self, grid: halox.Grid) -> dict[str, Any]:
        """Return the options of an exchange: the axes by name or number, a single one without a sequence."""
        if self.axes is None:
            return {}
        named = [grid.dims[n] if n % 2 else n for n in self.axes]
        return {"axes": named[0] if len(named) == 1 else named}

    @contextmanager
    def grid(self, comm: Any, device: Any = "cpu", path: str | None = None) -> Iterator[halox.Grid]:
        """Return a grid, whose messages go the way of the case while it exists."""
        is_checkerboard = any(f.parity for f in self.fields)
        is_even = self.blocks == divide(self.shape, self.procs) and not is_checkerboard
        division = {"proc_shape": self.procs} if is_even else {"blocks": self.blocks}
        if self.weights is not None:
            division = {"proc_shape": self.procs, "weights": self.weights}
        with pytest.MonkeyPatch.context() as patch:
            if self.way == "in place":
                read_in_place(patch)
            elif self.way == "MPI":
                patch.setenv("HALOX_NODE", "rank")
            with halox.Grid(
                self.shape,
                halo=self.fields[0].halo,
                periodic=self.periodic,
                corners=self.corners,
                connect=self.connect or None,
                checkerboard=is_checkerboard,
                comm=comm,
                device=device,
                path=path or None,
                **division,
            ) as grid:
                yield grid

    def make(self, grid: halox.Grid, values: Sequence[np.ndarray] = ()) -> list[Any]:
        """Make the fields, with given values in all cells."""
        fields = []
        for f in self.fields:
            u = grid.empty(f.dtype, **f.options())
            if f.mine:
                u = grid.declare(grid.xp.empty(u.shape, f.dtype), **f.options())
            fields.append(u)
        for u, array in zip(fields, values, strict=bool(values)):
            u[...] = grid.xp.asarray(array)
        return fields

    def expected(self, coords: Sequence[int], turn: int = 0) -> list[Expected]:
        """Return a rank's arrays before and after an exchange, one per field."""
        return [
            expected(self, f, coords, whole_values(self, f, 17 * number + 7 * turn))
            for number, f in enumerate(self.fields)
        ]


def divide(shape: Sequence[int], procs: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the sizes of even blocks along each axis; the first blocks are larger."""
    return tuple(
        tuple(n // parts + (part < n % parts) for part in range(parts))
        for n, parts in zip(shape, procs, strict=True)
    )


def factorisations(ranks: int, ndim: int) -> list[tuple[int, ...]]:
    """Return all process grids of some ranks."""
    if ndim == 1:
        return [(ranks,)]
    return [
        (p, *rest)
        for p in range(1, ranks + 1)
        if ranks % p == 0
        for rest in factorisations(ranks // p, ndim - 1)
    ]


def allocated(grid: Any, like: Any, allocation: str) -> Any:
    """Return an array of the shape and dtype of ``like``, with the memory layout that ``allocation`` names."""
    xp, shape, dtype = grid.xp, like.shape, like.dtype
    n = len(shape)
    if allocation == "F":
        return xp.empty(shape, dtype, order="F")
    if allocation == "turned":
        order = [*range(1, n), 0]
        return xp.empty([shape[k] for k in order], dtype).transpose(np.argsort(order).tolist())
    if allocation == "backwards":
        return xp.empty(shape, dtype)[(slice(None, None, -1),) * n]
    if allocation == "part":
        return xp.empty([k + 3 for k in shape], dtype)[(slice(1, -2),) * n]
    return xp.empty(shape, dtype)


def host(array: Any) -> np.ndarray:
    """Return an array of NumPy or CuPy in host memory."""
    return array if isinstance(array, np.ndarray) else array.get()


def cast(ids: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Convert unique ids to values of any dtype, as distinct as the dtype allows."""
    if dtype.names:
        out = np.zeros(ids.shape, dtype)
        for name in dtype.names:
            out[name] = cast(ids, dtype[name])
        return out
    if dtype.kind == "b":
        return (ids * 2654435761 >> 7) % 2 == 0
    if dtype.kind == "S":
        return (ids % 900 + 100).astype(dtype)
    if dtype.kind in "iu":
        return (ids % min(2**31, np.iinfo(dtype).max)).astype(dtype)
    if dtype.kind == "c":
        return (ids + 1j * (ids + 1)).astype(dtype)
    return (ids % 2000 if dtype == np.float16 else ids).astype(dtype)


def rounded(ids: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Convert ids to small whole numbers for integers, otherwise to numbers whose sums are rounded."""
    if dtype.kind in "iu":
        return (ids * 7 % 19 - 9).astype(dtype)
    return (np.sin(ids) + 1j * np.cos(ids) if dtype.kind == "c" else np.sin(ids)).astype(dtype)


def poison(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    return np.frombuffer(b"\xa5" * (math.prod(shape) * dtype.itemsize), dtype).reshape(shape).copy()


def whole_values(case: Case, f: Field, salt: int) -> np.ndarray:
    """Return the values of all points of the whole grid."""
    points = [
        n + (is_so and not wraps)
        for n, is_so, wraps in zip(case.shape, f.staggered, case.periodic, strict=True)
    ]
    flat = np.arange(math.prod(points)).reshape(*points, *(1,) * len(f.after))
    components = np.arange(math.prod(f.before + f.after)).reshape(
        *f.before, *(1,) * len(points), *f.after
    )
    ids = flat * 97 + components * 31 + salt + 1
    return rounded(ids, f.dtype) if f.sides else cast(ids, f.dtype)


def images(
    case: Case, f: Field, points: Sequence[np.ndarray]
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Return the points of which stored points are images, whether there are any, and whether beyond a connection.

    Positions are counted in half cells, so that the formulas of folds hold for centers and faces.
    """
    places = [
        0 if is_so else 1 if f.position is None else PLACES.index(f.position[axis])
        for axis, is_so in enumerate(f.staggered)
    ]
    ends = [2 * n for n in case.shape]
    at = [2 * i + place for i, place in zip(points, places, strict=True)]
    at = [p % end if wraps else p for p, end, wraps in zip(at, ends, case.periodic, strict=True)]
    crossed = np.zeros(at[0].shape, bool)

    def across(connection: halox.Connection, along_x: int, turn: Any) -> list[np.ndarray]:
        image = [*at]
        if connection.flip is not None:
            x = connection.flip
            image[x] = 2 * (along_x if case.periodic[x] else case.shape[x]) - image[x]
        else:
            x, cells = connection.shift  # type: ignore[misc]
            image[x] = image[x] + 2 * cells * turn
        if case.periodic[x]:
            image[x] = image[x] % ends[x]
        return image

    for key, connection in case.connect.items():
        axis, side = key if isinstance(key, tuple) else (key, None)
        along_x, along_y = CENTERS[connection.pivot]
        if side is None:
            below, above = at[axis] < places[axis], at[axis] - places[axis] >= ends[axis]
            moves, turn = below | above, np.where(below, 1, -1)
            image = across(connection, along_x, -turn)
            image[axis] = at[axis] + turn * ends[axis]
        else:
            line = ends[axis] - along_y if side == "high" else along_y
            image = across(connection, along_x, 1)
            image[axis] = 2 * line - at[axis]
            beyond = at[axis] > line if side == "high" else at[axis] < line
            x = connection.flip if connection.flip is not None else connection.shift[0]  # type: ignore[index]
            # On the line the copy is the point with the higher index.
            number, copy = (
                (p - places[x]) // 2 % (case.shape[x] + f.staggered[x]) for p in (image[x], at[x])
            )
            moves = beyond | ((at[axis] == line) & (number < copy))
        at = [np.where(moves, there, here) for there, here in zip(image, at, strict=True)]
        crossed |= moves
    exists, sources = np.ones(crossed.shape, bool), []
    for p, place, n, wraps, is_so in zip(
        at, places, case.shape, case.periodic, f.staggered, strict=True
    ):
        i = (p - place) // 2
        last = n - 1 + (is_so and not wraps)
        i = i % n if wraps else i
        exists &= (i >= 0) & (i <= last)
        sources.append(np.clip(i, 0, last))
    return sources, exists, crossed


def pad_side(
    u: np.ndarray, axis: int, side: int, width: int, boundary: Side, staggered: bool
) -> np.ndarray:
    """Pad one side of a whole field with one boundary."""
    widths = [(0, 0)] * u.ndim
    widths[axis] = (width, 0) if side == 0 else (0, width)
    kind, number = boundary if isinstance(boundary, tuple) else (boundary, None)
    shape = [1] * u.ndim
    shape[axis] = width
    # Distances from the last point inside, in the order of the array.
    distances = np.arange(width, 0, -1) if side == 0 else np.arange(1, width + 1)
    distances = distances.reshape(shape)
    at = [slice(None)] * u.ndim
    at[axis] = slice(0, width) if side == 0 else slice(u.shape[axis], None)
    if kind in MIRRORS:
        mode = "symmetric" if "symmetric" in kind else "reflect"
        padded = np.pad(u, widths, mode=mode)
        padded[tuple(at)] *= np.array(MIRRORS[kind], u.dtype)
        if number is not None:
            padded[tuple(at)] += np.array(2 * number, u.dtype)
        return padded
    if kind == "constant":
        if staggered:
            layer = [slice(None)] * u.ndim
            layer[axis] = slice(0, 1) if side == 0 else slice(-1, None)
            u = u.copy()
            u[tuple(layer)] = number
        return np.pad(u, widths, constant_values=number)
    padded = np.pad(u, widths, mode="edge")
    if kind == "gradient":
        padded[tuple(at)] += (distances * (number if side else -number)).astype(u.dtype)
    elif kind == "extrapolate":
        edge, inner = ((0, 1), (-1, -2))[side]
        slope = np.take(u, [edge], axis) - np.take(u, [inner], axis)
        padded[tuple(at)] += distances.astype(u.dtype) * slope
    return padded


def name_of(side: Side) -> Any:
    return side[0] if isinstance(side, tuple) else side


def pad_between_mirrors(
    u: np.ndarray, axis: int, widths: tuple[int, int], pair: tuple[Side, Side]
) -> np.ndarray:
    """Pad both sides of a whole field by mirrors, in turn: each reads the cells that the other one has filled."""
    most, extent = max(widths), u.shape[axis]
    if extent == 1 and all("reflect" in name_of(side) for side in pair):
        return np.pad(u, [widths if n == axis else (0, 0) for n in range(u.ndim)], mode="reflect")
    have = [0, 0]
    while min(have) < most:
        for side, boundary in enumerate(pair):
            # From this wall on, with the cells beyond the other one.
            body = np.take(
                u, range(have[0], u.shape[axis]) if side == 0 else range(have[0] + extent), axis
            )
            width = min(most, body.shape[axis] - ("reflect" in name_of(boundary)))
            padded = pad_side(body, axis, side, width, boundary, staggered=False)
            ends = (
                np.take(padded, range(width), axis),
                np.take(padded, range(padded.shape[axis] - width, padded.shape[axis]), axis),
            )
            u = np.concatenate([ends[0], body] if side == 0 else [body, ends[1]], axis)
            have[side] = width
    first = have[0] - widths[0]
    return np.take(u, range(first, have[0] + extent + widths[1]), axis)


def pad_component(
    case: Case, f: Field, u: np.ndarray, sides: Sequence[tuple[Side, Side]]
) -> tuple[np.ndarray, np.ndarray]:
    """Pad a component of the whole field axis by axis; return also which points have a value."""
    exists = np.ones(u.shape, bool)
    for axis, (low, high) in enumerate(f.halo):
        at, is_staggered, pair = len(f.before) + axis, f.staggered[axis], sides[axis]
        widths = [(0, 0)] * u.ndim
        if case.periodic[axis]:
            extent = u.shape[at]
            widths[at] = (low, high + is_staggered)  # a block stores the first point of the next
            u, exists = np.pad(u, widths, mode="wrap"), np.pad(exists, widths, mode="wrap")
            if pair[0] is not None:
                cut: list[Any] = [slice(None)] * u.ndim
                periods = -(-max(low, high + 1) // extent)
                for n in range(periods):  # each period has another factor
                    for cut[at], factor in (
                        (slice(low + (n + 1) * extent, None), pair[0][1]),
                        (slice(0, max(low - n * extent, 0)), 1 / pair[0][1]),
                    ):
                        u[tuple(cut)] *= np.array(factor, u.dtype)
            continue
        if all(name_of(side) in MIRRORS for side in pair) and max(low, high) >= u.shape[at]:
            u = pad_between_mirrors(u, at, (low, high), pair)
            widths[at] = low, high
            exists = np.pad(exists, widths, "edge")
            continue
        for side, width in enumerate((low, high)):
            widths[at] = (width, 0) if side == 0 else (0, width)
            boundary = pair[side]
            exists = (
                np.pad(exists, widths)
                if boundary is None
                else np.pad(exists, widths, constant_values=True) & np.pad(exists, widths, "edge")
            )
            u = pad_side(u, at, side, width, boundary or "edge", is_staggered)
    return u, exists


def pad_whole(case: Case, f: Field, whole: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pad each component of the whole field with its boundaries; return also which points have a value."""
    results: list[np.ndarray] = []
    first, ndim = len(f.before), len(case.shape)
    for component in np.ndindex(*f.before, *f.after):
        index = (
            *(slice(n, n + 1) for n in component[:first]),
            *(slice(None),) * ndim,
            *(slice(n, n + 1) for n in component[first:]),
        )
        sides = f.sides.get(component, f.sides.get((), ((None, None),) * ndim))
        padded = pad_component(case, f, whole[index], sides)
        if not results:
            shape = (*f.before, *padded[0].shape[first : first + ndim], *f.after)
            results = [np.zeros(shape, one.dtype) for one in padded]
        for result, one in zip(results, padded, strict=True):
            result[index] = one
    return results[0], results[1]


def without_sides(f: Field, axes: Sequence[int]) -> Field:
    """Return a field without the boundaries along some axes."""
    sides = {
        component: tuple((None, None) if n in axes else pair for n, pair in enumerate(pairs))
        for component, pairs in f.sides.items()
    }
    return replace(f, sides=sides)


@dataclass
class Expected:
    """One rank's array before and after an exchange, and masks of its cells."""

    before: np.ndarray
    after: np.ndarray
    owned: np.ndarray
    filled: np.ndarray  # halo cells that the exchange must fill, and no others

    @property
    def is_poisoned(self) -> bool:
        """Whether an exchange that did nothing would be found."""
        return not self.filled.any() or not same_values(self.before, self.after)

    @property
    def received_bytes(self) -> int:
        """Bytes of the filled cells, without the padding of structures."""
        dtype = self.before.dtype
        fields = [dtype[name] for name in dtype.names] if dtype.names else [dtype]
        return int(self.filled.sum()) * sum(one.itemsize for one in fields)


def expected(case: Case, f: Field, coords: Sequence[int], whole: np.ndarray) -> Expected:
    """Return a rank's array of a field with given values of the whole grid, before and after an exchange."""
    bounds = [
        (sum(sizes[:part]), sum(sizes[: part + 1]))
        for sizes, part in zip(case.blocks, coords, strict=True)
    ]
    cells = [
        np.arange(start - low, stop + is_so + high)
        for (start, stop), (low, high), is_so in zip(bounds, f.halo, f.staggered, strict=True)
    ]
    # The last block of an axis that ends owns one more point of a staggered field.
    ends = [
        stop + (is_so and stop == n and not wraps)
        for (_, stop), is_so, n, wraps in zip(
            bounds, f.staggered, case.shape, case.periodic, strict=True
        )
    ]
    limits = [(start, end) for (start, _), end in zip(bounds, ends, strict=True)]
    if f.parity is None:
        points = list(np.meshgrid(*cells, indexing="ij"))
    else:  # the array holds one cell of each pair along the last axis
        cells[-1] = np.unique(cells[-1] // 2)
        *others, pairs = np.meshgrid(*cells, indexing="ij")
        odd = (sum(others) + 2 * pairs) % 2 != (f.parity == "odd")
        points = [*others, 2 * pairs + odd]
    is_outside = [(x < a) | (x >= b) for x, (a, b) in zip(points, limits, strict=True)]
    owned = ~np.any(is_outside, axis=0)
    reached = np.ones(owned.shape, bool)
    for axis, (x, (start, end), (low, high)) in enumerate(zip(points, limits, f.halo, strict=True)):
        past = end + (f.staggered[axis] and end == bounds[axis][1])
        if f.offsets:
            low, high = min(low, max(f.offsets)), min(high, max(f.offsets))
        reached &= (x >= start - low) & (x < past + high)
    if f.parity and f.offsets:  # only cells that the stencil of an owned cell reads
        near = np.zeros(owned.shape, bool)
        for axis, offset in np.ndindex(len(points), 2 * len(f.offsets)):
            step = f.offsets[offset // 2] * (-1) ** offset
            moved = [x + step * (k == axis) for k, x in enumerate(points)]
            near |= np.all(
                [(x >= a) & (x < b) for x, (a, b) in zip(moved, limits, strict=True)], axis=0
            )
        reached &= near
    elif f.offsets or not case.corners:
        reached &= np.sum(is_outside, axis=0) <= 1

    for axis in case.fixed:
        reached &= ~is_outside[axis]

    def spread(a: np.ndarray) -> np.ndarray:
        a = a.reshape((1,) * len(f.before) + a.shape + (1,) * len(f.after))
        return np.broadcast_to(a, (*f.before, *owned.shape, *f.after))

    first = (slice(None),) * len(f.before)
    sources, exists, crossed = images(case, f, points)
    values, exists = whole[first + tuple(sources)], spread(exists)
    if f.sides:
        padded = pad_whole(case, without_sides(f, case.fixed), whole)
        cut = first + tuple(
            slice(start, start + x.size) for (start, _), x in zip(bounds, cells, strict=True)
        )
        values, exists = padded[0][cut], padded[1][cut]
    elif crossed.any():
        signs = np.array([sign_of(f, one) for one in np.ndindex(*f.before, *f.after)], f.dtype)
        signs = signs.reshape(*f.before, *(1,) * owned.ndim, *f.after)
        values = np.where(spread(crossed), values * signs, values)
    before = poison(values.shape, f.dtype)
    mine = tuple(slice(start, end) for start, end in limits)
    if f.parity is None:
        before[spread(owned)] = whole[first + mine].ravel()
    else:
        before[spread(owned)] = values[spread(owned)]
    after, changes = before.copy(), exists & spread(reached)
    after[changes] = values[changes]
    return Expected(before, after, spread(owned), changes & ~spread(owned))


def sign_of(f: Field, component: tuple[int, ...]) -> int:
    if not isinstance(f.sign, dict):
        return int(f.sign)
    keyed = component[0] if len(component) == 1 else component
    return int(f.sign.get(keyed, f.sign.get((), 1)))


def same_values(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays hold the same bytes, padding of structures ignored."""
    if a.dtype.names:
        return all(same_values(a[name], b[name]) for name in a.dtype.names)
    if a.dtype.itemsize == 16 and a.dtype.kind == "f":  # 6 of its bytes are padding
        return bool(np.array_equal(a, b, equal_nan=True))
    return np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def exchange_all(
    case: Case, grid: halox.Grid, calls: Sequence[tuple[list[Any], Callable[..., object]]]
) -> bool:
    """Call with fields of the case, with other values in each turn, and return whether all cells are right."""
    right = []
    for turn, (fields, call) in enumerate(calls):
        wanted = case.expected(grid.proc_coords, turn)
        for u, w in zip(fields, wanted, strict=True):
            right.append(u.shape == w.after.shape and w.is_poisoned)
            u[...] = grid.xp.asarray(w.before)
        grid.comm.Barrier()
        call(*fields)
        for f, u, w in zip(case.fields, fields, wanted, strict=True):
            right.append(same_cells(f, host(u), w.after))
    return all(right)


def check_exchanges(case: Case, comm: Any, device: Any = "cpu") -> None:
    """Exchange the fields of a case, others of these layouts, and the first again in two halves; compare all cells.

    Each rank gets one message from each other rank; with fields of one parity all of them hold no surplus cell.
    """
    with case.grid(comm, device) as grid:
        first, second = case.make(grid), case.make(grid)
        options = case.options(grid)
        plan, exchange = grid.plan(*first, **options), partial(grid.exchange, **options)

        def in_two_halves(*_: Any) -> None:
            plan.start()
            plan.finish()

        rows = [row for row in plan.explain().rows if row.direction == "receive"]
        calls = [(first, exchange), (second, exchange), (first, in_two_halves)]
        is_right = exchange_all(case, grid, calls)
        needed = sum(w.received_bytes for w in case.expected(grid.proc_coords))
    assert is_right
    # Cells of other fields that are copied within a rank may be copied in steps.
    if any(f.parity for f in case.fields):
        assert sum(row.nbytes for row in rows) == needed
    if device == "cpu":
        assert len({row.peer for row in rows}) == len(rows)
        assert case.way != "MPI" or {row.protocol for row in rows} <= {"copy", "mpi"}


def check_overlap(case: Case, width: int | None, comm: Any) -> None:
    """Compute during an exchange: when a region comes, all cells that its steps read have their values.

    A step reads ``width`` cells on each side along each axis, or the field's halo, of which it reads the cells up to
    the largest of the field's offsets. The regions cover each owned cell once. Each field of the case in turn has the
    loop, at last with other arrays than the plan's.
    """
    right = []
    with case.grid(comm) as grid:
        fields = case.make(grid)
        plan = grid.plan(*fields, overlap=True, **case.options(grid))
        others = case.make(grid)
        for turn, number in enumerate([*range(len(fields)), 0]):
            arrays = others if turn == len(fields) else fields
            wanted = case.expected(grid.proc_coords, turn)
            for u, w in zip(arrays, wanted, strict=True):
                u[...] = w.before
            comm.Barrier()
            f, u, w = case.fields[number], arrays[number], wanted[number]
            covered = np.zeros(u.shape, int)
            for cells in plan.overlap(*arrays, width=width, field=number):
                covered[cells] += 1
                for axis, halo in enumerate(f.halo):
                    most = max(f.offsets, default=max(halo))
                    reach = (width, width) if width is not None else [min(n, most) for n in halo]
                    if f.parity and axis == len(f.halo) - 1:
                        reach = (reach[0] + 1) // 2, (reach[1] + 1) // 2  # in pairs of cells
                    read, at = [*cells], len(f.before) + axis
                    first, stop = cells[at].start - reach[0], cells[at].stop + reach[1]
                    read[at] = slice(max(first, 0), stop)
                    right.append(same_cells(f, u[tuple(read)], w.after[tuple(read)]))
            right.append(np.array_equal(covered, w.owned))
            for f, u, w in zip(case.fields, arrays, wanted, strict=True):
                right.append(same_cells(f, u, w.after))
    assert all(right)


def check_stale_halos(case: Case, comm: Any) -> None:
    """With HALOX_DEBUG_HALO=1, halo cells are stale between start and finish, unless they have been filled.

    All other cells keep their values.
    """
    right = []
    with case.grid(comm) as grid:
        fields, wanted = case.make(grid), case.expected(grid.proc_coords)
        plan = grid.plan(*fields, **case.options(grid))
        for u, w in zip(fields, wanted, strict=True):
            u[...] = w.before
        plan.start()
        between = [u.copy() for u in fields]
        plan.finish()
        for f, u, found, w in zip(case.fields, fields, between, wanted, strict=True):
            right.append(same_cells(f, u, w.after))
            kept = w.owned & (w.before == w.after) | ~w.owned & ~w.filled
            right.append(same_values(found[kept], w.before[kept]))
            kinds = {side[0] for side in f.all_sides if isinstance(side, tuple)}
            # Phases, and constants on the walls of staggered fields, change halo cells that copies have filled.
            changes = "phase" in kinds or ("constant" in kinds and any(f.staggered))
            if f.dtype.kind in "iufc" and not changes:
                right.append(bool((is_stale(found) | (found == w.after))[w.filled].all()))
    assert all(right)


def is_stale(u: np.ndarray) -> np.ndarray:
    """Return the cells with the value by which halox marks stale cells: NaN, or the least integer."""
    return np.isnan(u) if u.dtype.kind in "fc" else u == np.iinfo(u.dtype).min


def same_cells(f: Field, a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays of a field are equal; where signs change, zeros of both signs are."""
    return bool(np.array_equal(a, b)) if f.sides or f.sign != 1 else same_values(a, b)


def small_integers(case: Case, grid: halox.Grid, seed: int) -> list[np.ndarray]:
    """Return values for the fields of a case on this rank, whose sums are exact."""
    rng = np.random.default_rng([seed, grid.rank])
    arrays = [w.before for w in case.expected(grid.proc_coords)]
    return [rng.integers(-9, 10, one.shape).astype(one.dtype) for one in arrays]


def is_adjoint(grid: halox.Grid, xs: Sequence[Any], ys: Sequence[Any], **options: Any) -> bool:
    """Exchange xs and accumulate ys, which hold small integers, also in halos: <E x, y> = <x, E' y> over all ranks.

    So the exchange must keep the halo cells that it does not fill, and the accumulation, too.
    """

    def inner(a: Sequence[Any], b: Sequence[Any]) -> complex:
        pairs = zip(a, b, strict=True)
        mine = sum(np.vdot(x.astype("c16"), y.astype("c16")) for x, y in pairs)
        return complex(grid.comm.allreduce(complex(mine)))

    start, other = ([host(u).copy() for u in fields] for fields in (xs, ys))
    grid.exchange(*xs, **options)
    left = inner([host(x) for x in xs], other)
    grid.accumulate(*ys, **options)
    return left == inner(start, [host(y) for y in ys])


def check_adjoint(case: Case, comm: Any, device: Any = "cpu") -> None:
    """Check that an accumulation is the adjoint of an exchange, clears the halo cells that it adds, and no others."""
    with case.grid(comm, device) as grid:
        start, other = (small_integers(case, grid, seed) for seed in (1, 2))
        xs, ys = case.make(grid, start), case.make(grid, other)
        right = [is_adjoint(grid, xs, ys, **case.options(grid))]
        for f, y, before, w in zip(
            case.fields, ys, other, case.expected(grid.proc_coords), strict=True
        ):
            kept = ~w.filled & ~w.owned
            if not f.sides and not case.connect:
                right += [not host(y)[w.filled].any()]
                right += [np.array_equal(host(y)[kept], before[kept])]
    assert all(right), right


def check_accumulate_as_on_cpu(case: Case, comm: Any) -> None:
    """Check that an accumulation on GPUs has the result of the same accumulation of NumPy arrays."""
    with case.grid(comm, "gpu") as gpu, case.grid(comm) as cpu:
        start = small_integers(case, gpu, 3)
        a, b = case.make(gpu, start), case.make(cpu, start)
        gpu.accumulate(*a, **case.options(gpu))
        cpu.accumulate(*b, **case.options(cpu))
        right = [bool(np.array_equal(host(x), y)) for x, y in zip(a, b, strict=True)]
    assert all(right), right
