"""Distributed transforms of random fields, compared with scipy.fft of the whole array and sums over exponentials."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.fft
from hypothesis import strategies as st
from mpi4py import MPI

import halox
from halox.errors import (
    ClosedError,
    DecompositionError,
    FieldError,
    HaloxError,
    MismatchError,
    PathError,
)
from tests.fakes import fake_cufft
from tests.limits import fill_shared_memory
from tests.mpi.bad_input import Table, check_error, read_only
from tests.mpi.conftest import agree, by_first
from tests.oracle import Case, Field, Halo, allocated, factorisations, host
from tests.strategies import SELDOM, WAYS, components, divided, on_ranks
from tests.support import trials

pytestmark = pytest.mark.usually(3)

SEED = 20261120

World = MPI.Intracomm
PAIRS = {"f4": "c8", "f8": "c16"}
TOLERANCE = {"f4": 2e-6, "f8": 2e-14}
ALLOCATIONS = ["new", "grid", "F", "part", "backwards"]
MOST_CELLS = 40_000
"""Limit for fields with components, since the reference transforms the whole array."""


@dataclass
class Transform:
    """A transform and the layouts of its fields."""

    blocks: tuple[tuple[int, ...], ...]
    halo: Halo
    periodic: tuple[bool, ...]
    axes: tuple[int, ...]
    real: bool
    norm: str
    dealias: bool
    precision: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    source: str
    target: str
    way: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sum, self.blocks))

    @property
    def physical_dtype(self) -> str:
        return self.precision if self.real else PAIRS[self.precision]

    @property
    def spectral_dtype(self) -> str:
        return PAIRS[self.precision]

    @property
    def points(self) -> tuple[int, ...]:
        """Points of the physical field along each axis."""
        fine = self.axes if self.dealias else ()
        return tuple(3 * n // 2 if axis in fine else n for axis, n in enumerate(self.shape))

    @property
    def grid(self) -> Case:
        return Case(self.blocks, self.periodic, [Field("f8", self.halo)], way=self.way)


@st.composite
def transforms(draw: st.DrawFn, ranks: int, precisions: Sequence[str] = ("f8", "f4")) -> Transform:
    ndim = draw(st.integers(1 if ranks == 1 else 2, 4))
    procs = draw(st.sampled_from(factorisations(ranks, ndim)))
    # Enough lines for every intermediate division, halved axes included.
    least, most = (2 * ranks if ranks > 1 else 1), 2 * ranks + (40, 20, 10, 7)[ndim - 1]
    shape = [draw(st.integers(least, most)) for _ in procs]
    blocks = draw(divided(shape, procs))
    halo = tuple(
        (draw(st.integers(0, min(*sizes, 2))), draw(st.integers(0, min(*sizes, 2))))
        for sizes in blocks
    )
    axes = draw(st.permutations(range(ndim)))
    before, after = draw(components(ndim))
    if math.prod((*shape, *before, *after)) > MOST_CELLS:
        before, after = (), ()
    return Transform(
        blocks,
        draw(st.sampled_from([halo, ((0, 0),) * ndim])),
        tuple(draw(st.booleans()) for _ in procs),
        tuple(axes[: draw(st.integers(1, ndim))] if draw(SELDOM) else axes),
        draw(st.booleans()),
        draw(st.sampled_from(["backward", "ortho", "forward"])),
        draw(SELDOM),
        draw(st.sampled_from(precisions)),
        before,
        after,
        draw(st.sampled_from(ALLOCATIONS[1:])),
        draw(st.sampled_from(ALLOCATIONS)),
        draw(WAYS),
    )


def random_field(case: Transform, rng: np.random.Generator) -> np.ndarray:
    """Return the whole physical field with its component axes, in double precision."""
    shape = (*case.before, *case.points, *case.after)
    whole = rng.standard_normal(shape)
    return whole if case.real else whole + 1j * rng.standard_normal(shape)


def analysis(n: int, m: int, half: bool) -> np.ndarray:
    """Return the matrix from m values to the coefficients of n points, by the definition."""
    numbers = np.fft.rfftfreq(n, 1 / n) if half else np.fft.fftfreq(n, 1 / n)
    phase = 2 * np.pi / m * np.outer(numbers, np.arange(m))
    matrix = np.exp(-1j * phase)
    if m > n and n % 2 == 0:  # the Nyquist mode, a cosine, has two halves
        matrix[n // 2] = 2 * np.cos(phase[n // 2])
    return matrix * (n / m)


def synthesis(n: int, m: int) -> np.ndarray:
    """Return the matrix from all n coefficients to m values."""
    phase = 2 * np.pi / m * np.outer(np.arange(m), np.fft.fftfreq(n, 1 / n))
    matrix = np.exp(1j * phase)
    if n % 2 == 0:
        matrix[:, n // 2] = np.cos(phase[:, n // 2])
    return matrix / n


def along(matrix: np.ndarray, axis: int, array: np.ndarray) -> np.ndarray:
    return np.moveaxis(np.tensordot(matrix, array, (1, axis)), 0, axis)


def spectrum(case: Transform, whole: np.ndarray) -> np.ndarray:
    """Return the whole spectrum: by scipy.fft, or by the definition if the resolutions differ."""
    first = len(case.before)
    places = [first + axis for axis in case.axes]
    if not case.dealias:
        function = scipy.fft.rfftn if case.real else scipy.fft.fftn
        return np.asarray(function(whole, axes=places, norm=case.norm))
    found, scale = whole, 1.0
    for axis in reversed(case.axes):
        n, m = case.shape[axis], case.points[axis]
        found = along(analysis(n, m, case.real and axis == case.axes[-1]), first + axis, found)
        scale *= {"backward": 1, "ortho": 1 / math.sqrt(n), "forward": 1 / n}[case.norm]
    return found * scale


def place(case: Transform, grid: halox.Grid, dtype: str, allocation: str, halo: Any) -> Any:
    """Allocate a field of a grid, with the memory layout that ``allocation`` names."""
    options = {"components": (*case.before, ..., *case.after)}
    field = grid.empty(dtype, **options)
    if allocation == "grid":
        field[...] = halo
        return field
    other = allocated(grid, field, allocation)
    other[...] = halo
    return grid.declare(other, **options)


def owned(case: Transform, grid: halox.Grid, whole: np.ndarray) -> np.ndarray:
    return whole[(slice(None),) * len(case.before) + grid.owned]


def close_to(case: Transform, found: np.ndarray, wanted: np.ndarray, scale: float) -> bool:
    """Whether the error is only due to rounding; ``scale`` is the largest value of the whole array."""
    if not found.size:
        return True
    error = float(abs(found - wanted).max())
    return error <= TOLERANCE[case.precision] * 8 * max(scale, 1e-30)


def reference(case: Transform, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a random field, its spectrum, and the inverse transform of the spectrum."""
    whole = random_field(case, np.random.default_rng([SEED, seed]))
    whole = whole.astype(case.physical_dtype).astype("f8" if case.real else "c16")
    back = whole
    if case.dealias:
        for axis in case.axes:
            n, m, at = case.shape[axis], case.points[axis], len(case.before) + axis
            back = along(synthesis(n, m) @ analysis(n, m, False), at, back)
        back = back.real if case.real else back
    return whole, spectrum(case, whole), back


def check(case: Transform, comm: World, device: str = "cpu") -> None:
    """Transform forward and backward, twice with different values, and compare with the reference."""
    right: dict[str, bool] = {}
    with (
        case.grid.grid(comm, device) as grid,
        halox.FFT(grid, case.axes, real=case.real, norm=case.norm, dealias=case.dealias) as fft,
    ):
        right["grids"] = fft.physical.grid_shape == case.points and not np.any(fft.grid.halo)
        u = place(case, fft.physical, case.physical_dtype, case.source, np.nan)
        for turn in range(2):
            whole, wanted, back = by_first(lambda turn=turn: reference(case, turn), comm)
            mine = owned(case, fft.physical, whole)
            fft.physical.interior(u)[...] = fft.physical.xp.asarray(mine)
            given = host(u).copy()
            out = None
            if case.target != "new":
                out = place(case, fft.grid, case.spectral_dtype, case.target, np.nan)
            s = fft.forward(u, out)
            right[f"target {turn}"] = (out is None or s is out) and s.dtype == case.spectral_dtype
            right[f"source {turn}"] = np.array_equal(host(u), given, equal_nan=True)
            part = owned(case, fft.grid, wanted)
            scale = float(abs(wanted).max())
            right[f"forward {turn}"] = close_to(case, host(s), part, scale)
            # Transform back from the reference's coefficients.
            s[...] = fft.grid.xp.asarray(part)
            given = host(s).copy()
            out = None
            if case.target != "new":
                out = place(case, fft.physical, case.physical_dtype, case.target, -7)
            v = fft.backward(s, out)
            right[f"spectrum {turn}"] = np.array_equal(host(s), given)
            part = owned(case, fft.physical, back)
            cells = host(fft.physical.interior(v))
            scale = float(abs(whole).max())
            right[f"backward {turn}"] = close_to(case, cells, part, scale)
            beside, untouched = host(v).copy(), 0 if out is None else -7
            beside[fft.physical.layout(v).interior] = untouched
            right[f"halo {turn}"] = bool(np.all(beside == untouched))
    assert all(right.values()), [name for name, is_right in right.items() if not is_right]


@pytest.mark.usually(3, 4)
@on_ranks(transforms, trials(160), part=2)
def test_random_transforms(case: Transform, comm: World) -> None:
    check(case, comm)


@on_ranks(transforms, trials(28))
def test_steps_of_a_gpu(case: Transform, comm: World) -> None:
    """NumPy executes the plans of cuFFT: the axis orders, factors and copies differ from the host's."""
    with pytest.MonkeyPatch.context() as patch:
        fake_cufft.take_the_hosts_place(patch)
        before = fake_cufft.PlanNd.launched
        check(case, comm)
        assert fake_cufft.PlanNd.launched > before


@pytest.mark.ranks(2, 3, 4, 6, 8)
def test_with_full_shared_memory(comm: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room for segments, work arrays are in private memory, and all messages use MPI requests."""
    fill_shared_memory(monkeypatch, above=(1 << 18) - 1)  # only the status of the ranks
    own = comm.Dup()  # without segments of earlier tests
    with box(own) as grid, halox.FFT(grid) as fft:
        s = fft.forward(grid.ones("c16"))
        assert np.isclose(fft.grid.sum(s), math.prod(grid.grid_shape))
        v = grid.interior(fft.backward(s))
        assert agree(bool(np.allclose(v, 1)), comm)
        rows = [row for report in fft.explain() for row in report.rows]
    assert {row.protocol for row in rows if row.path == "host"} == {"mpi"}, rows


@pytest.mark.ranks(3, 4, 6)
@pytest.mark.usually(3, 4)
def test_blocks_that_are_not_in_rank_order(comm: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of two nodes alternate, and halox places blocks by node: messages stay in rows of the process grid."""
    monkeypatch.setenv("HALOX_NODE", f"node {comm.rank % 2}")
    shape = (12, 12, 12)
    p, q = MPI.Compute_dims(comm.size, 2)
    with box(comm, shape) as grid, halox.FFT(grid) as fft:
        whole = np.random.default_rng(SEED).standard_normal(shape) + 0j
        u = grid.zeros("c16")
        grid.interior(u)[...] = whole[grid.owned]
        s = fft.forward(u)
        assert agree(bool(np.allclose(s, scipy.fft.fftn(whole)[fft.grid.owned], atol=1e-11)), comm)
        v = grid.interior(fft.backward(s))
        assert agree(bool(np.allclose(v, whole[grid.owned], atol=1e-13)), comm)
        assert messages_sent(fft) == [n - 1 for n in (q, p) if n > 1]


@on_ranks(partial(transforms, precisions=["f4"]), 5)
def test_without_scipy(case: Transform, comm: World) -> None:
    """Without scipy.fft, numpy.fft transforms single precision."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("halox.fft.host_fft._scipy", lambda: None)
        check(case, comm)


def messages_sent(fft: halox.FFT) -> list[int]:
    """Return how many messages this rank sends to other ranks in each transpose of a forward transform."""
    return [
        sum(row.direction == "send" and row.peer != report.rank for row in report.rows)
        for report in fft.explain()
    ]


def box(comm: World, shape: tuple[int, ...] = (12, 10, 14), **options: Any) -> halox.Grid:
    p, q = MPI.Compute_dims(comm.size, 2)
    settings: dict[str, Any] = {"halo": 1, "periodic": True, "proc_shape": (p, q, 1)}
    return halox.Grid(shape, comm=comm, device="cpu", **(settings | options))


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.usually(3, 4)
def test_divisions_of_pencils(real: bool, comm: World) -> None:
    """A transform of pencils takes two transposes, each within a row or a column of the process grid."""
    p, q = MPI.Compute_dims(comm.size, 2)
    with box(comm, (24, 24, 24)) as grid, halox.FFT(grid, real=real) as fft:
        assert fft.grid.proc_shape == (1, p, q)
        fft.forward(grid.zeros("f8" if real else "c16"))
        cells = 24 * 24 * (13 if real else 24)
        # One transpose per divided axis; no message leaves its row or column.
        assert messages_sent(fft) == [n - 1 for n in (q, p) if n > 1]
        assert comm.allreduce(math.prod(fft.grid.rank_shape)) == cells


def test_divisions_of_slabs_and_blocks(comm: World) -> None:
    n = comm.size
    with (
        halox.Grid((16, 16, 16), proc_shape=(n, 1, 1), comm=comm, device="cpu") as slabs,
        halox.FFT(slabs, real=True) as fft,
        halox.FFT(slabs, (1, 2)) as local,
    ):
        assert fft.grid.proc_shape == (1, n, 1) and f" {int(n > 1)} transpose(s)" in repr(fft)
        assert local.grid.proc_shape == (n, 1, 1) and " 0 transpose(s)" in repr(local)
    if n == 8:
        with (
            halox.Grid((16, 16, 16), proc_shape=(2, 2, 2), comm=comm, device="cpu") as blocks,
            halox.FFT(blocks) as fft,
        ):
            assert fft.grid.proc_shape == (1, 4, 2) and " 3 transpose(s)" in repr(fft)


@pytest.mark.ranks(1, 2, 3, 4, 6)
@pytest.mark.usually(3, 4)
@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize(
    ("shape", "axes", "components", "transposes"),
    [
        ((15, 13), (0, 1), (), 1),
        ((9, 10, 11), (0, 1, 2), (2,), 1),
        ((9, 10, 11), (2, 0), (), 0),
        ((13, 3, 15), (2,), (), 0),
        ((4, 5, 6), (0, 1, 2), (), 2),  # pencils of 6 ranks
    ],
)
def test_a_shape_is_divided_for_the_fewest_transposes(
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    components: tuple[int, ...],
    transposes: int,
    real: bool,
    comm: World,
) -> None:
    if comm.size == 1 or (shape == (4, 5, 6) and comm.size < 6):
        transposes = min(transposes, comm.size - 1, 1)
    with halox.FFT(shape, axes, real=real, comm=comm, device="cpu") as fft:
        whole = np.random.default_rng(SEED).standard_normal((*components, *shape))
        u = fft.physical.zeros("f8" if real else "c16", components=components)
        u[...] = whole[..., *fft.physical.owned]
        s = fft.forward(u)
        function, first = np.fft.rfftn if real else np.fft.fftn, len(components)
        wanted = function(whole, axes=[first + axis for axis in axes])[..., *fft.grid.owned]
        assert agree(bool(np.allclose(s, wanted, atol=1e-11)), comm)
        assert agree(bool(np.allclose(fft.backward(s), u, atol=1e-12)), comm)
        assert f" {transposes} transpose(s)" in repr(fft) and "proc_shape" not in repr(fft)
        assert len(fft.explain()) == transposes
    with pytest.raises(ClosedError):
        fft.physical.zeros()


@pytest.mark.ranks(4, 6)
@pytest.mark.usually(4)
def test_the_division_of_fewest_transposes_is_named(comm: World) -> None:
    with halox.Grid((24, 24, 24), comm=comm, device="cpu") as grid, halox.FFT(grid) as fft:
        assert f"2 transpose(s) (1 with proc_shape=({comm.size}, 1, 1))" in repr(fft)


def test_wave_numbers(comm: World) -> None:
    shape = (12, 10, 14)
    with box(comm) as grid, halox.FFT(grid, (2, 0), real=True) as fft:
        wanted = [np.fft.rfftfreq(12) * 12, np.zeros(10), np.fft.fftfreq(14) * 14]
        assert fft.grid.grid_shape == (7, 10, 14)
        plain, scaled = fft.wavenumbers(), fft.wavenumbers((1, 2, 4 * np.pi))
        for axis, (k, q, all_of) in enumerate(zip(plain, scaled, wanted, strict=True)):
            assert k.dtype == "f8"
            assert k.shape == tuple(
                n if i == axis else 1 for i, n in enumerate(fft.grid.rank_shape)
            )
            mine = all_of[fft.grid.owned[axis]]
            assert np.allclose(k.ravel(), mine, rtol=0, atol=1e-12)
            assert np.allclose(q.ravel(), mine * (2 * np.pi, np.pi, 0.5)[axis], rtol=1e-14)
        assert len(shape) == len(plain)
        one = fft.wavenumbers(2 * np.pi)
        assert all(np.allclose(a, b) for a, b in zip(one, plain, strict=True))


def test_a_direction_makes_its_plans_in_its_first_call(comm: World) -> None:
    """Later calls with new arrays, also with other strides, need no new plans."""
    with box(comm) as grid, halox.FFT(grid) as fft:
        ranks = fft.grid.domain.world.ranks
        s = fft.forward(grid.ones("c16"))
        plans = ranks.plans
        assert fft.explain(backward=True) == ()
        assert agree(bool(np.allclose(grid.interior(fft.backward(s)), 1)), comm)
        assert len(fft.explain(backward=True)) == len(fft.explain()) == ranks.plans - plans
        plans = ranks.plans
        for k in range(3):
            v = fft.backward(fft.forward(np.full(grid.padded_shape, k + 1j, order="CFC"[k])))
            assert np.allclose(grid.interior(v), k + 1j)
            assert grid.layout(v).spec.halo == grid.halo
        assert ranks.plans == plans
    fft.close()
    fft.close()
    assert "closed" in repr(fft)


# Errors


def making(change: Callable[[World], dict[str, Any]], **options: Any) -> Callable[[World], None]:
    """Return a call that makes a transform; ``change`` has a rank's arguments."""

    def call(comm: World) -> None:
        with box(comm, **options) as grid:
            halox.FFT(grid, **change(comm))

    return call


def moving(
    make: Callable[[halox.FFT], tuple[Any, ...]],
    direction: str = "forward",
    warm: bool = False,
    **arguments: Any,
) -> Callable[[World], None]:
    def call(comm: World) -> None:
        with box(comm) as grid, halox.FFT(grid, **arguments) as fft:
            if warm:
                fft.forward(fft.physical.zeros("f8" if fft.real else "c16"))
            getattr(fft, direction)(*make(fft))

    return call


def slabs(cells: Callable[[int], tuple[int, ...]], **options: Any) -> Callable[[World], None]:
    """Return a call that makes a transform of slabs; ``cells`` has the grid's shape on n ranks."""

    def call(comm: World) -> None:
        with halox.Grid(cells(comm.size), comm=comm, device="cpu", halo=0, **options) as grid:
            halox.FFT(grid, real=True)

    return call


def closed(comm: World) -> None:
    with box(comm) as grid:
        fft = halox.FFT(grid)
        u = grid.zeros("c16")
        fft.forward(u)
        fft.close()
        fft.forward(u)


def of_closed_grid(comm: World) -> None:
    grid = box(comm)
    grid.close()
    halox.FFT(grid)


def grid_closed_under_it(comm: World) -> None:
    grid = box(comm)
    fft = halox.FFT(grid)
    u = grid.zeros("c16")
    fft.forward(u)
    grid.close()
    try:
        fft.forward(u)
    finally:
        fft._release()


def in_place(comm: World) -> None:
    grid = halox.Grid((4, 4), halo=0, comm=MPI.COMM_SELF, device="cpu")
    with grid, halox.FFT(grid) as fft:
        u = np.zeros((4, 4), "c16")
        fft.forward(u, u)


def of_another_grid(comm: World) -> None:
    with box(comm, (16, 12, 20)) as other:
        moving(lambda f: (other.zeros("c16"),))(comm)


def of_a_spectrum(comm: World) -> None:
    """Pass a spectrum that has the shape of the physical field."""
    with halox.Grid((4, 4), halo=0, comm=MPI.COMM_SELF, device="cpu") as grid, halox.FFT(grid) as f:
        f.forward(f.forward(grid.zeros("c16")))


def physical(dtype: str, **options: Any) -> Callable[[halox.FFT], tuple[Any, ...]]:
    return lambda fft: (fft.physical.zeros(dtype, **options),)


def into(make: Callable[[halox.FFT], Any]) -> Callable[[World], None]:
    return moving(lambda fft: (fft.physical.zeros("c16"), make(fft)))


TABLE: Table = {
    "no grid": (lambda c: halox.FFT("3"), HaloxError, "grid"),
    "a shape that is none": (lambda c: halox.FFT((4, 0)), DecompositionError, "grid_shape"),
    "an axis that a shape has not": (
        lambda c: halox.FFT((8, 9), 2, comm=c, device="cpu"),
        DecompositionError,
        "axes",
    ),
    "ranks of a grid": (making(lambda c: {"comm": c}), HaloxError, "comm"),
    "a shape, real on one rank >1": (
        lambda c: halox.FFT((8, 9), comm=c, device="cpu", real=c.rank == 1),
        MismatchError,
        "real",
    ),
    "fewer lines than ranks >2": (
        slabs(lambda n: (4 * n, n), proc_shape=(0, 1)),
        DecompositionError,
        "some ranks have no cells",
    ),
    "one axis on several ranks >1": (
        slabs(lambda n: (8 * n,)),
        DecompositionError,
        "some ranks have no cells",
    ),
    "an axis that there is not": (
        making(lambda c: {"axes": (0, 3)}),
        DecompositionError,
        "axes",
    ),
    "an axis twice": (making(lambda c: {"axes": (0, -3)}), DecompositionError, "axes"),
    "no axis": (making(lambda c: {"axes": ()}), DecompositionError, "axes"),
    "norm": (making(lambda c: {"norm": "unitary"}), DecompositionError, "norm"),
    "real": (making(lambda c: {"real": 1}), DecompositionError, "real"),
    "path": (making(lambda c: {"path": "pigeon"}), PathError, "path"),
    "axes that differ >1": (
        making(lambda c: {"axes": (0, 1) if c.rank else (1, 0)}),
        MismatchError,
        "axes",
    ),
    "a closed grid": (of_closed_grid, ClosedError, "closed"),
    "a closed FFT": (closed, ClosedError, "the FFT is closed"),
    "a grid closed later": (grid_closed_under_it, ClosedError, "closed"),
    "integers": (moving(physical("i8")), FieldError, "dtype"),
    "integers after a good call": (moving(physical("i8"), warm=True), FieldError, "dtype"),
    "complex numbers, real": (moving(physical("c16"), real=True), FieldError, "dtype"),
    "real numbers, complex": (moving(physical("f8")), FieldError, "dtype"),
    "another grid": (of_another_grid, FieldError, "fft.physical"),
    "a spectrum of the same shape": (of_a_spectrum, FieldError, "fft.physical"),
    "a physical field, backward": (
        moving(physical("c16"), "backward"),
        FieldError,
        "fft.physical",
    ),
    "a staggered field": (moving(physical("c16", staggered=0)), FieldError, "fft.physical"),
    "a list on one rank >1": (
        moving(
            lambda f: ([0.0] if f.grid.rank == 1 else np.zeros(f.physical.padded_shape, "c16"),)
        ),
        FieldError,
        "numpy.ndarray",
    ),
    "dtypes that differ >1": (
        moving(lambda f: (np.zeros(f.physical.padded_shape, "c8" if f.grid.rank else "c16"),)),
        MismatchError,
        "dtype",
    ),
    "components that differ >1": (
        moving(lambda f: (np.zeros((2 + f.grid.rank, *f.physical.padded_shape), "c16"),)),
        MismatchError,
        "components",
    ),
    "out of another dtype": (into(lambda f: f.grid.zeros("c8")), FieldError, "out"),
    "out of another shape": (into(lambda f: np.zeros((2, 2, 2), "c16")), FieldError, "out"),
    "out that is read-only": (into(lambda f: read_only(f.grid, "c16")), FieldError, "out"),
    "in place": (in_place, FieldError, "u and out share memory"),
    "lengths": (moving(lambda f: (0,), "wavenumbers"), FieldError, "lengths"),
}


@pytest.mark.parametrize("name", TABLE)
def test_bad_input(name: str, comm: World) -> None:
    check_error(TABLE, name, comm)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_wrong_array_on_one_rank_after_good_calls(direction: str, comm: World) -> None:
    """All ranks raise, although the calls of the other ranks are cached and need no checks."""
    with halox.Grid((8, 7, 9), halo=0, comm=comm, device="cpu") as grid:
        fft = halox.FFT(grid)
        u = grid.zeros("c16")
        s = fft.forward(u)
        fft.backward(s, u)
        array = u if direction == "forward" else s
        wrong = array.real.astype("i4") if grid.rank == 0 else array
        with pytest.raises(FieldError if grid.rank == 0 else MismatchError):
            getattr(fft, direction)(wrong)


@pytest.mark.ranks(2, 3)
def test_an_error_along_an_undivided_axis(comm: World) -> None:
    """Although the transform needs no other rank, the error of one rank is an error on all ranks, at once."""
    with (
        halox.Grid((2 * comm.size, 6), proc_shape=(comm.size, 1), device="cpu", comm=comm) as grid,
        halox.FFT(grid, axes=1) as fft,
    ):
        u = fft.physical.ones("c16")
        wrong = np.ones(3) if comm.rank == 0 else u
        with pytest.raises(FieldError, match="u must be"):
            fft.forward(wrong)
        total = fft.grid.sum(fft.forward(u))
        assert agree(abs(total - 12 * comm.size) < 1e-12, comm), total
        with pytest.raises(MismatchError if comm.rank else FieldError):
            fft.grid.sum(fft.forward(wrong))
