"""Random grids and fields, and the result of an exchange, computed without halox.

Every value encodes its global point, component and field, so that a cell in the wrong place has a wrong value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import halox
from tests.mpi.conftest import agree

RECORD = np.dtype([("a", "f8"), ("b", "i2"), ("c", "u1")], align=True)
DTYPES = ["f8", "f4", "f2", "c8", "c16", "i1", "u2", "i4", "i8", "?", "M8[s]", "S3", "g", RECORD]
NUMERIC = ["f8", "f4", "c16", "i4", "i8"]


@dataclass
class Field:
    """One random field's layout."""

    dtype: np.dtype[Any]
    halo: tuple[tuple[int, int], ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    staggered: tuple[bool, ...]
    mine: bool  # allocated by the user, not by the grid

    def options(self) -> dict[str, Any]:
        return {
            "components": self.before,
            "components_after": self.after,
            "staggered": tuple(a for a, s in enumerate(self.staggered) if s),
            "halo": self.halo,
        }


@dataclass
class Case:
    """One random grid with its fields."""

    shape: tuple[int, ...]
    procs: tuple[int, ...]
    periodic: tuple[bool, ...]
    halo: tuple[tuple[int, int], ...]
    corners: bool
    fields: list[Field] = field(default_factory=list)

    def grid(self, comm: Any, device: Any = "cpu", **options: Any) -> halox.Grid:
        return halox.Grid(
            self.shape,
            halo=self.halo,
            periodic=self.periodic,
            proc_shape=self.procs,
            corners=self.corners,
            comm=comm,
            device=device,
            **options,
        )

    def expected(self, coords: tuple[int, ...]) -> list[Expected]:
        """Return a rank's arrays before and after an exchange, one per field."""
        return [expected(self, f, coords, number) for number, f in enumerate(self.fields)]


def factorisations(ranks: int, ndim: int) -> list[tuple[int, ...]]:
    if ndim == 1:
        return [(ranks,)]
    return [
        (p, *rest)
        for p in range(1, ranks + 1)
        if ranks % p == 0
        for rest in factorisations(ranks // p, ndim - 1)
    ]


def random_case(
    rng: np.random.Generator, ranks: int, dtypes: list[Any], *, wide: bool = False
) -> Case:
    """Return a random case; with ``wide`` its blocks are thin, and halos may be wider than blocks."""
    ndim = int(rng.integers(1, 5))
    choices = factorisations(ranks, ndim)
    procs = choices[int(rng.integers(len(choices)))]
    periodic = tuple(bool(b) for b in rng.integers(2, size=ndim))
    most = 3 if wide else {1: 40, 2: 12, 3: 6, 4: 3}[ndim]
    shape = tuple(int(p * rng.integers(1, most) + rng.integers(0, p)) for p in procs)

    def widths() -> tuple[tuple[int, int], ...]:
        # The smallest block limits the width. A staggered axis needs one more point on the high side: see below.
        found = []
        for n, p, wraps in zip(shape, procs, periodic, strict=True):
            limit = min(n // p if p > 1 or wraps else 3, 3)
            if wide:
                limit = n if wraps else n + 1
            low, high = (int(rng.integers(0, limit + 1)) for _ in range(2))
            found.append((low, high))
        return tuple(found)

    case = Case(shape, procs, periodic, widths(), bool(rng.integers(4)))
    for _ in range(int(rng.integers(1, 4))):
        halo = case.halo if rng.integers(2) else widths()
        staggered = tuple(
            bool(rng.integers(4) == 0) and (wide or h[1] + 1 <= n // p or not (p > 1 or wraps))
            for n, p, wraps, h in zip(shape, procs, periodic, halo, strict=True)
        )
        extents = [
            tuple(int(n) for n in rng.integers(1, 4, size=int(rng.integers(0, 3)))) for _ in "ab"
        ]
        before, after = extents if rng.integers(2) else ((), ())
        if len(before) + len(after) + ndim > 6:
            before = ()
        dtype = np.dtype(dtypes[int(rng.integers(len(dtypes)))])
        case.fields.append(Field(dtype, halo, before, after, staggered, bool(rng.integers(2))))
    return case


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


def part_range(n: int, parts: int, part: int) -> tuple[int, int]:
    sizes = [n // parts + (k < n % parts) for k in range(parts)]
    return sum(sizes[:part]), sum(sizes[: part + 1])


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


def poison(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    return np.frombuffer(b"\xa5" * (math.prod(shape) * dtype.itemsize), dtype).reshape(shape).copy()


@dataclass
class Expected:
    """One rank's array before and after an exchange, and masks and ids of its cells."""

    before: np.ndarray
    after: np.ndarray
    owned: np.ndarray  # bool, of the whole array's shape
    filled: np.ndarray  # bool: halo cells that the exchange must fill
    ids: np.ndarray  # global id of each cell, -1 outside the grid


def expected(case: Case, f: Field, coords: tuple[int, ...], number: int) -> Expected:
    indices, owned_axis = [], []
    for axis, (n, p, wraps) in enumerate(zip(case.shape, case.procs, case.periodic, strict=True)):
        start, stop = part_range(n, p, coords[axis])
        low, high = f.halo[axis]
        extra = int(f.staggered[axis])
        local = np.arange(start - low, stop + extra + high)
        points = n + (extra if not wraps else 0)
        last = coords[axis] == p - 1 and not wraps
        owned_axis.append((local >= start) & (local < stop + (extra if last else 0)))
        if wraps:
            local = local % points
        indices.append(np.where((local < 0) | (local >= points), -1, local))
    grids = np.meshgrid(*indices, indexing="ij")
    inside = np.all([g >= 0 for g in grids], axis=0)
    flat = np.zeros(inside.shape, np.int64)
    for g, n in zip(grids, case.shape, strict=True):
        flat = flat * (n + 1) + np.maximum(g, 0)
    owners = np.meshgrid(*owned_axis, indexing="ij")
    owned = np.all(owners, axis=0)
    outside_count = np.sum([~o for o in owners], axis=0)
    filled = inside & ~owned & (case.corners | (outside_count <= 1))

    def spread(a: np.ndarray) -> np.ndarray:
        a = a.reshape((1,) * len(f.before) + a.shape + (1,) * len(f.after))
        return np.broadcast_to(a, (*f.before, *owned.shape, *f.after))

    components = np.arange(math.prod(f.before) * math.prod(f.after)).reshape(
        (*f.before, *((1,) * owned.ndim), *f.after)
    )
    ids = spread(flat) * 97 + components * 31 + number * 17 + 1
    values = cast(ids, f.dtype)
    before = poison(ids.shape, f.dtype)
    before[spread(owned)] = values[spread(owned)]
    after = before.copy()
    after[spread(filled)] = values[spread(filled)]
    return Expected(before, after, spread(owned), spread(filled), np.where(spread(inside), ids, -1))


def same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays hold the same values, padding of structures ignored."""
    if a.dtype.names:
        return all(same_bytes(a[name], b[name]) for name in a.dtype.names)
    if a.dtype.itemsize == 16 and a.dtype.kind == "f":  # 6 of its bytes are padding
        return bool(np.array_equal(a, b, equal_nan=True))
    return np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def make_fields(grid: halox.Grid, case: Any, values: Sequence[np.ndarray]) -> list[Any]:
    """Make the fields of a case, with given values in all cells."""
    fields = []
    for f, array in zip(case.fields, values, strict=True):
        if f.mine:
            u = grid.xp.empty(array.shape, f.dtype)
            grid.declare(u, **f.options())
        else:
            u = grid.empty(f.dtype, **f.options())
        u[...] = grid.xp.asarray(array)
        fields.append(u)
    return fields


def check_exchanges(
    grid: halox.Grid,
    fields: Sequence[Any],
    wanted: Sequence[Any],
    told: Any,
    call: Callable[[], object] | None = None,
    rounds: int = 3,
) -> None:
    """Exchange several times by ``call``, by default `Grid.exchange`, and compare all cells each time.

    ``wanted`` has ``before``, with poisoned halos, and ``after`` of each field.
    """
    for _ in range(rounds):
        for u, w in zip(fields, wanted, strict=True):
            u[...] = grid.xp.asarray(w.before)
        grid.comm.Barrier()
        grid.exchange(*fields) if call is None else call()
        right = [same_bytes(host(u), w.after) for u, w in zip(fields, wanted, strict=True)]
        assert agree(all(right), grid.comm), (told, right)


def small_integers(rng: np.random.Generator, wanted: Sequence[Any]) -> list[np.ndarray]:
    """Return values for fields of these shapes and dtypes, whose sums are exact."""
    return [rng.integers(-9, 10, w.before.shape).astype(w.before.dtype) for w in wanted]


def check_accumulate_as_on_cpu(
    gpu: halox.Grid, cpu: halox.Grid, case: Any, rng: np.random.Generator
) -> None:
    """Assert that an accumulation on GPUs has the result of the same accumulation of NumPy arrays."""
    start = small_integers(rng, case.expected(gpu.coords))
    a, b = make_fields(gpu, case, start), make_fields(cpu, case, start)
    gpu.accumulate(*a)
    cpu.accumulate(*b)
    right = [bool(np.array_equal(host(x), y)) for x, y in zip(a, b, strict=True)]
    assert agree(all(right), gpu.comm), (case, right)


def check_adjoint(
    grid: halox.Grid, case: Any, rng: np.random.Generator, told: tuple[Any, ...]
) -> None:
    """Assert <E u, v> = <u, E^T v> over all stored cells of all ranks, exactly, for small integers from ``rng``."""
    wanted = case.expected(grid.coords)
    start, other = small_integers(rng, wanted), small_integers(rng, wanted)
    u, v = make_fields(grid, case, start), make_fields(grid, case, other)
    grid.exchange(*u)
    grid.accumulate(*v)

    def inner(a: list[Any], b: list[Any]) -> complex:
        pairs = zip(a, b, strict=True)
        mine = sum(complex(np.sum(x.astype("c16") * y.astype("c16"))) for x, y in pairs)
        return complex(grid.comm.allreduce(mine))

    assert inner(u, other) == inner(start, v), told
    cleared = [bool(np.all(x[w.filled] == 0)) for x, w in zip(v, wanted, strict=True)]
    kept = [
        bool(np.array_equal(x[~w.filled & ~w.owned], o[~w.filled & ~w.owned]))
        for x, o, w in zip(v, other, wanted, strict=True)
    ]
    assert agree(all(cleared) and all(kept), grid.comm), (*told, cleared, kept)
