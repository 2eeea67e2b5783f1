"""Distributed transforms of random fields, compared with scipy.fft of the whole array and sums over exponentials."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import scipy.fft
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
from halox.runtime import shared_memory
from halox.runtime.communicator import Communicator
from tests.fakes import fake_cufft
from tests.mpi.bad_input import Table, check_error, read_only
from tests.mpi.conftest import agree, by_first
from tests.oracle import allocated, factorisations, host
from tests.support import trials

pytestmark = pytest.mark.usually(3)

SEED = 20261120

World = MPI.Intracomm
NORMS = ["backward", "ortho", "forward"]
PAIRS = {"f4": "c8", "f8": "c16"}
TOLERANCE = {"f4": 2e-6, "f8": 2e-14}
ALLOCATIONS = ["new", "grid", "F", "part", "backwards"]
MOST_CELLS = 40_000
"""Limit for fields with components, since the reference transforms the whole array."""


@dataclass
class Case:
    """A transform and the layouts of its fields."""

    shape: tuple[int, ...]
    procs: tuple[int, ...]
    blocks: list[tuple[int, ...] | None]
    halo: tuple[tuple[int, int], ...]
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

    @property
    def physical_dtype(self) -> str:
        return self.precision if self.real else PAIRS[self.precision]

    @property
    def spectral_dtype(self) -> str:
        return PAIRS[self.precision]

    @property
    def points(self) -> tuple[int, ...]:
        """Points of the physical field along each axis."""
        fine = self.dealias
        return tuple(
            3 * n // 2 if fine and axis in self.axes else n for axis, n in enumerate(self.shape)
        )


def random_case(rng: np.random.Generator, ranks: int) -> Case:
    ndim = int(rng.integers(1, 5)) if ranks == 1 else int(rng.integers(2, 5))
    choices = factorisations(ranks, ndim)
    procs = choices[int(rng.integers(len(choices)))]
    most = {1: 40, 2: 20, 3: 10, 4: 7}[ndim]
    # Enough lines for every intermediate division, halved axes included.
    shape = tuple(
        int(n) for n in rng.integers(2 * ranks if ranks > 1 else 1, 2 * ranks + most, size=ndim)
    )
    count = int(rng.integers(1, ndim + 1)) if rng.integers(3) == 0 else ndim
    axes = tuple(int(axis) for axis in rng.permutation(ndim)[:count])
    blocks: list[tuple[int, ...] | None] = []
    for n, p in zip(shape, procs, strict=True):
        bounds = np.sort(rng.permutation(np.arange(1, n))[: p - 1])
        sizes = tuple(int(m) for m in np.diff([0, *bounds, n]))
        blocks.append(sizes if rng.integers(3) == 0 else None)
    smallest = [min(s) if s else n // p for n, p, s in zip(shape, procs, blocks, strict=True)]
    halo = tuple(
        (int(rng.integers(0, min(s, 2) + 1)), int(rng.integers(0, min(s, 2) + 1))) for s in smallest
    )
    if rng.integers(2):
        halo = ((0, 0),) * ndim
    components = tuple(int(n) for n in rng.integers(1, 4, size=int(rng.choice([0, 0, 1, 2]))))
    while components and math.prod(shape) * math.prod(components) > MOST_CELLS:
        components = components[1:]
    first = int(rng.integers(0, len(components) + 1))
    return Case(
        shape,
        procs,
        blocks,
        halo,
        tuple(bool(b) for b in rng.integers(2, size=ndim)),
        axes,
        bool(rng.integers(2)),
        NORMS[int(rng.integers(3))],
        bool(rng.integers(3) == 0),
        ["f4", "f8", "f8"][int(rng.integers(3))],
        components[:first],
        components[first:],
        ALLOCATIONS[int(rng.integers(1, len(ALLOCATIONS)))],
        ALLOCATIONS[int(rng.integers(len(ALLOCATIONS)))],
    )


def random_field(case: Case, rng: np.random.Generator) -> np.ndarray:
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


def spectrum(case: Case, whole: np.ndarray) -> np.ndarray:
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


def place(case: Case, grid: halox.Grid, dtype: str, allocation: str, halo: Any) -> Any:
    """Allocate a field of a grid, with the memory layout that ``allocation`` names."""
    options = {"components": case.before, "components_after": case.after}
    field = grid.empty(dtype, **options)
    if allocation == "grid":
        field[...] = halo
        return field
    other = allocated(grid, field, allocation)
    other[...] = halo
    return grid.declare(other, **options)


def owned(case: Case, grid: halox.Grid, whole: np.ndarray) -> np.ndarray:
    return whole[(slice(None),) * len(case.before) + grid.owned]


def close_to(case: Case, found: np.ndarray, wanted: np.ndarray, scale: float) -> bool:
    """Whether the error is only due to rounding; ``scale`` is the largest value of the whole array."""
    if not found.size:
        return True
    error = float(abs(found - wanted).max())
    return error <= TOLERANCE[case.precision] * 8 * max(scale, 1e-30)


def check(case: Case, comm: World, rng: np.random.Generator, device: str = "cpu") -> None:
    """Transform forward and backward, twice with different values, and compare with the reference."""
    with (
        halox.Grid(
            case.shape,
            halo=case.halo,
            periodic=case.periodic,
            proc_shape=case.procs,
            blocks=case.blocks,
            comm=comm,
            device=device,
        ) as grid,
        halox.FFT(grid, case.axes, real=case.real, norm=case.norm, dealias=case.dealias) as fft,
    ):
        assert fft.physical.grid_shape == case.points and fft.grid.halo == ((0, 0),) * len(
            case.shape
        )
        u = place(case, fft.physical, case.physical_dtype, case.source, np.nan)

        def reference() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            """Return a random field, its spectrum, and the inverse transform of the spectrum."""
            whole = random_field(case, rng)
            whole = whole.astype(case.physical_dtype).astype("f8" if case.real else "c16")
            back = whole
            if case.dealias:
                for axis in case.axes:
                    n, m, at = case.shape[axis], case.points[axis], len(case.before) + axis
                    back = along(synthesis(n, m) @ analysis(n, m, False), at, back)
                back = back.real if case.real else back
            return whole, spectrum(case, whole), back

        for _ in range(2):
            whole, wanted, back = by_first(reference, comm)
            mine = owned(case, fft.physical, whole)
            fft.physical.interior(u)[...] = fft.physical.xp.asarray(mine)
            given = host(u).copy()
            out = None
            if case.target != "new":
                out = place(case, fft.grid, case.spectral_dtype, case.target, np.nan)
            s = fft.forward(u, out)
            assert out is None or s is out
            assert s.dtype == case.spectral_dtype
            assert np.array_equal(host(u), given, equal_nan=True), "the source was changed"
            part = owned(case, fft.grid, wanted)
            right = close_to(case, host(s), part, float(abs(wanted).max()))
            assert agree(right, comm), (SEED, case, "forward")
            # Transform back from the reference's coefficients.
            s[...] = fft.grid.xp.asarray(part)
            given = host(s).copy()
            out = None
            if case.target != "new":
                out = place(case, fft.physical, case.physical_dtype, case.target, -7)
            v = fft.backward(s, out)
            assert np.array_equal(host(s), given), "the spectrum was changed"
            part = owned(case, fft.physical, back)
            cells = host(fft.physical.interior(v))
            right = close_to(case, cells, part, float(abs(whole).max()))
            assert agree(right, comm), (SEED, case, "backward")
            beside = host(v).copy()
            beside[fft.physical.layout(v).interior] = 0 if out is None else -7
            assert np.all(beside == (0 if out is None else -7)), "the halo was written"


@pytest.mark.parametrize("number", range(trials(28)))
@pytest.mark.usually(3, 4)
def test_random_transforms(number: int, comm: World) -> None:
    rng = np.random.default_rng([SEED, 37, comm.size, number])
    check(random_case(rng, comm.size), comm, rng)


@pytest.mark.parametrize("number", range(16))
@pytest.mark.part(2)
def test_steps_of_a_gpu(number: int, comm: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy executes the plans of cuFFT: the axis orders, factors and copies differ from the host's."""
    fake_cufft.install(monkeypatch)
    monkeypatch.setattr("halox.fft.transform.HostTransforms", fake_cufft.Transforms)
    rng = np.random.default_rng([SEED, 41, comm.size, number])
    check(random_case(rng, comm.size), comm, rng)
    assert agree(fake_cufft.PlanNd.launched > 0, comm)


@pytest.mark.parametrize("number", range(8))
def test_without_shared_memory(number: int, comm: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """With each rank as a separate node, all messages use MPI requests."""
    monkeypatch.setenv("HALOX_NODE", "rank")
    rng = np.random.default_rng([SEED, 43, comm.size, number])
    check(random_case(rng, comm.size), comm, rng)


@pytest.mark.ranks(2, 3, 4, 6, 8)
def test_with_full_shared_memory(comm: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room for segments, work arrays are in private memory, and all messages use MPI requests."""
    refused: list[int] = []
    create = shared_memory.create

    def without_room(name: str, nbytes: int) -> Any:
        if nbytes >= 1 << 18:  # segments; the status of the ranks is smaller
            refused.append(nbytes)
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(name, nbytes)

    monkeypatch.setattr(shared_memory, "create", without_room)
    own = comm.Dup()  # without segments of earlier tests
    with box(own) as grid, halox.FFT(grid) as fft:
        s = fft.forward(grid.ones("c16"))
        assert np.isclose(fft.grid.sum(s), math.prod(grid.grid_shape))
        v = grid.interior(fft.backward(s))
        assert agree(bool(np.allclose(v, 1)), comm)
        rows = [row for report in fft.explain() for row in report.rows]
    assert agree(bool(refused), comm)
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


@pytest.mark.ranks(1, 2, 3, 4)
def test_without_scipy(comm: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without scipy.fft, numpy.fft transforms single precision."""
    monkeypatch.setattr("halox.runtime.host_fft._scipy", lambda: None)
    for number in range(40):
        rng = np.random.default_rng([SEED, 47, comm.size, number])
        case = random_case(rng, comm.size)
        if case.precision == "f4":
            check(case, comm, rng)


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


def test_a_derivative(comm: World) -> None:
    """The spectral derivative of a product of sines equals the closed form."""
    with box(comm) as grid, halox.FFT(grid, real=True) as fft:
        x, y, z = (2 * np.pi * i / n for i, n in zip(grid.indices(), grid.grid_shape, strict=True))
        u, v = grid.zeros(), grid.zeros()
        grid.interior(u)[...] = np.sin(3 * x) * np.cos(2 * y + 1) * np.sin(5 * z)
        s = fft.forward(u)
        _, ky, _ = fft.wavenumbers()
        s *= 1j * ky
        fft.backward(s, v)
        wanted = -2 * np.sin(3 * x) * np.sin(2 * y + 1) * np.sin(5 * z)
        assert agree(float(abs(grid.interior(v) - wanted).max()) < 1e-12, comm)


def test_an_orthonormal_transform_keeps_the_norm(comm: World) -> None:
    with box(comm) as grid, halox.FFT(grid, norm="ortho") as fft:
        u = grid.zeros("c16")
        grid.interior(u)[...] = np.random.default_rng(comm.rank).standard_normal(grid.rank_shape)
        s = fft.forward(u)
        assert np.isclose(fft.grid.norm(s), grid.norm(u), rtol=1e-13)


@pytest.mark.parametrize("shape", [(12, 10, 14), (9, 11, 15)])
@pytest.mark.parametrize("real", [False, True])
def test_a_product_without_aliases(shape: tuple[int, ...], real: bool, comm: World) -> None:
    """The dealiased spectrum of a product is the truncated convolution of the spectra, without aliases."""
    with (
        box(comm, shape) as grid,
        halox.FFT(grid, real=real) as plain,
        halox.FFT(grid, real=real, dealias=True) as fine,
    ):
        assert fine.physical.grid_shape == tuple(3 * n // 2 for n in shape)
        assert fine.grid.grid_shape == plain.grid.grid_shape and fine.grid.owned == plain.grid.owned
        rng = np.random.default_rng(SEED)
        # The highest mode below the Nyquist mode in every direction: its square has an alias.
        high = [(n - 1) // 2 for n in shape]
        x = [2 * np.pi * i / n for i, n in zip(grid.indices(), shape, strict=True)]
        phase = rng.uniform(0, 2 * np.pi)
        angle = sum(k * xi for k, xi in zip(high, x, strict=True)) + phase
        u = grid.zeros("f8" if real else "c16")
        grid.interior(u)[...] = np.cos(angle) if real else np.exp(1j * angle)
        s = plain.forward(u)
        v = fine.backward(s)
        v *= v
        s = fine.forward(v)
        back = grid.interior(plain.backward(s))
        # cos^2 = 1/2 + cos(2 angle) / 2: the second term is truncated; exp^2 is truncated entirely.
        wanted = 0.5 if real else 0
        assert agree(float(abs(back - wanted).max()) < 1e-13, comm)
        # Without dealiasing, the truncated term appears in another mode.
        w = u * u
        assert agree(float(abs(grid.interior(w) - wanted).max()) > 0.1, comm)


def test_the_nyquist_modes_make_the_round_trip(comm: World) -> None:
    with (
        box(comm, (8, 10, 12)) as grid,
        halox.FFT(grid, real=True) as plain,
        halox.FFT(grid, real=True, dealias=True) as fine,
    ):
        u = grid.zeros()
        rng = np.random.default_rng(SEED)
        grid.interior(u)[...] = rng.standard_normal((8, 10, 12))[grid.owned]
        s = plain.forward(u)
        again = fine.forward(fine.backward(s))
        assert agree(bool(np.allclose(again, s, rtol=0, atol=1e-11)), comm)


def test_later_calls_make_no_plans(comm: World) -> None:
    """New arrays, also with other strides, need no new plans and no new work arrays."""
    with box(comm) as grid, halox.FFT(grid) as fft:

        def made() -> list[int]:
            """Count the plans on the ranks of each grid, and the work arrays."""
            grids = [one.domain.world.ranks.plans for one in (grid, fft.grid)]
            return [*grids, *(len(p._work) for p in fft._pipelines.values())]

        fft.backward(fft.forward(grid.ones("c16")))
        before = made()
        for k in range(3):
            u = np.full(grid.padded_shape, k + 1j, order="CFC"[k])
            s = fft.forward(u)
            v = fft.backward(s)
            assert np.allclose(grid.interior(v), k + 1j)
            assert grid.layout(v).spec.halo == grid.halo
        assert made() == before


def test_a_direction_makes_its_plans_in_its_first_call(comm: World) -> None:
    with box(comm) as grid, halox.FFT(grid) as fft:
        u = grid.ones("c16")
        s = fft.forward(u)
        plans = fft.grid.domain.world.ranks.plans
        assert fft.explain(backward=True) == ()
        v = grid.interior(fft.backward(s))
        assert len(fft.explain(backward=True)) == len(fft.explain())
        assert fft.grid.domain.world.ranks.plans == plans + len(fft.explain())
        assert agree(bool(np.allclose(v, 1)), comm)


@pytest.mark.ranks(2, 3, 4)
def test_first_calls_take_few_rounds(comm: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each further transpose adds only the rounds of its plan."""
    steps: list[str] = []
    reduce = Communicator.reduce

    def counted(self: Communicator, mine: object, step: str, *given: Any, **options: Any) -> Any:
        steps.append(step)
        return reduce(self, mine, step, *given, **options)

    with box(comm) as grid:
        u = grid.ones("c16")
        monkeypatch.setattr(Communicator, "reduce", counted)
        with halox.FFT(grid) as fft:
            assert 0 < len(steps) <= 3, steps
            steps.clear()
            s = fft.forward(u)
            more = 4 * (len(fft.explain()) - 1)
            assert 4 <= len(steps) <= 9 + more, steps
            steps.clear()
            fft.backward(s)
            assert 4 <= len(steps) <= 6 + more, steps
            steps.clear()
            fft.forward(u, s)
            assert not steps


@pytest.mark.ranks(1, 2, 3, 4)
def test_grids_are_given_back(comm: World) -> None:
    with box(comm) as grid:
        u = grid.ones("c16")
        for _ in range(20):
            with halox.FFT(grid, dealias=False) as fft:
                s = fft.forward(u)
            assert "closed" in repr(fft)
        assert s.shape == s.copy().shape
        fft.close()


# Errors


def making(arguments: dict[str, Any], **options: Any) -> Callable[[World], None]:
    def call(comm: World) -> None:
        with box(comm, **options) as grid:
            halox.FFT(grid, **arguments)

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


def few_lines(comm: World) -> None:
    n = comm.size
    with halox.Grid((4 * n, n - 1), proc_shape=(n, 1), comm=comm, device="cpu", halo=0) as grid:
        halox.FFT(grid)


def few_coefficients(comm: World) -> None:
    n = comm.size
    with halox.Grid((4 * n, n), proc_shape=(n, 1), comm=comm, device="cpu", halo=0) as grid:
        halox.FFT(grid, real=True)


def one_axis(comm: World) -> None:
    with halox.Grid(8 * comm.size, comm=comm, device="cpu") as grid:
        halox.FFT(grid)


def axes_differ(comm: World) -> None:
    making({"axes": (0, 1) if comm.rank else (1, 0)})(comm)


def norm_differs(comm: World) -> None:
    making({"norm": "ortho" if comm.rank else "forward"})(comm)


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


def another_grid(comm: World) -> None:
    with box(comm, (16, 12, 20)) as other:
        moving(lambda f: (other.zeros("c16"),))(comm)


def spectral_to_forward(comm: World) -> None:
    """Pass a spectrum that has the shape of the physical field."""
    with halox.Grid((4, 4), halo=0, comm=MPI.COMM_SELF, device="cpu") as grid, halox.FFT(grid) as f:
        f.forward(f.forward(grid.zeros("c16")))


TABLE: Table = {
    "an FFT of what is no grid": (
        lambda c: halox.FFT(3),  # type: ignore[arg-type]
        HaloxError,
        "grid",
    ),
    "an FFT with fewer lines than ranks >1": (few_lines, DecompositionError, "ranks share the"),
    "a real FFT with fewer coefficients than ranks >2": (
        few_coefficients,
        DecompositionError,
        "ranks share the",
    ),
    "an FFT of one axis on several ranks >1": (
        one_axis,
        DecompositionError,
        "needs the whole axis",
    ),
    "an FFT along an axis that there is not": (
        making({"axes": (0, 3)}),
        DecompositionError,
        "axes",
    ),
    "an FFT along an axis twice": (making({"axes": (0, -3)}), DecompositionError, "axes"),
    "an FFT along no axis": (making({"axes": ()}), DecompositionError, "axes"),
    "an FFT with an unknown norm": (making({"norm": "unitary"}), DecompositionError, "norm"),
    "an FFT with an int as real=": (making({"real": 1}), DecompositionError, "real"),
    "an FFT by a path that there is not": (making({"path": "pigeon"}), PathError, "path"),
    "an FFT of axes that differ between ranks >1": (axes_differ, MismatchError, "axes"),
    "an FFT of norms that differ between ranks >1": (norm_differs, MismatchError, "norm"),
    "an FFT of a closed grid": (of_closed_grid, ClosedError, "closed"),
    "a closed FFT": (closed, ClosedError, "the FFT is closed"),
    "an FFT whose grid was closed": (grid_closed_under_it, ClosedError, "closed"),
    "an FFT of an integer field": (
        moving(lambda f: (f.physical.zeros("i8"),)),
        FieldError,
        "dtype",
    ),
    "an FFT of an integer field after good ones": (
        moving(lambda f: (f.physical.zeros("i8"),), warm=True),
        FieldError,
        "dtype",
    ),
    "a real FFT of a bool field": (
        moving(lambda f: (f.physical.zeros("?"),), real=True),
        FieldError,
        "dtype",
    ),
    "an FFT of half precision": (
        moving(lambda f: (f.physical.zeros("f2"),), real=True),
        FieldError,
        "dtype",
    ),
    "an FFT of extended precision": (
        moving(lambda f: (f.physical.zeros("G"),)),
        FieldError,
        "dtype",
    ),
    "a real FFT of a complex field": (
        moving(lambda f: (f.physical.zeros("c16"),), real=True),
        FieldError,
        "dtype",
    ),
    "a complex FFT of a real field": (
        moving(lambda f: (f.physical.zeros("f8"),)),
        FieldError,
        "dtype",
    ),
    "a backward FFT of a real field": (
        moving(lambda f: (f.grid.zeros("f8"),), "backward", real=True),
        FieldError,
        "dtype",
    ),
    "an FFT of a field of another grid": (another_grid, FieldError, "fft.physical"),
    "an FFT of a spectrum": (moving(lambda f: (f.grid.zeros("c16"),)), FieldError, "fft.physical"),
    "an FFT of a spectrum of the same shape": (spectral_to_forward, FieldError, "fft.physical"),
    "a backward FFT of a physical field": (
        moving(lambda f: (f.physical.zeros("c16"),), "backward"),
        FieldError,
        "fft.physical",
    ),
    "an FFT of a staggered field": (
        moving(lambda f: (f.physical.zeros("c16", staggered=0),)),
        FieldError,
        "fft.physical",
    ),
    "an FFT of a list": (moving(lambda f: ([0.0],)), FieldError, "numpy.ndarray"),
    "an FFT of a list on one rank >1": (
        moving(
            lambda f: ([0.0] if f.grid.rank == 1 else np.zeros(f.physical.padded_shape, "c16"),)
        ),
        FieldError,
        "numpy.ndarray",
    ),
    "an FFT of dtypes that differ between ranks >1": (
        moving(lambda f: (np.zeros(f.physical.padded_shape, "c8" if f.grid.rank else "c16"),)),
        MismatchError,
        "dtype",
    ),
    "an FFT of components that differ between ranks >1": (
        moving(lambda f: (np.zeros((2 + f.grid.rank, *f.physical.padded_shape), "c16"),)),
        MismatchError,
        "components",
    ),
    "an FFT into another dtype": (
        moving(lambda f: (f.physical.zeros("c16"), f.grid.zeros("c8"))),
        FieldError,
        "out",
    ),
    "an FFT into another shape": (
        moving(lambda f: (f.physical.zeros("c16"), np.zeros((2, 2, 2), "c16"))),
        FieldError,
        "out",
    ),
    "an FFT into other components": (
        moving(lambda f: (f.physical.zeros("c16"), f.grid.zeros("c16", components=2))),
        FieldError,
        "out",
    ),
    "an FFT into a read-only array": (
        moving(lambda f: (f.physical.zeros("c16"), read_only(f.grid, "c16"))),
        FieldError,
        "out",
    ),
    "an FFT in place": (in_place, FieldError, "u and out share memory"),
    "wave numbers of lengths of zero": (
        moving(lambda f: (0,), "wavenumbers"),
        FieldError,
        "lengths",
    ),
}


@pytest.mark.ranks(1, 2, 3, 4)
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
        kind = FieldError if grid.rank == 0 else MismatchError
        text = "has dtype int32" if grid.rank == 0 else "different calls: rank 0"
        with pytest.raises(kind, match=text):
            getattr(fft, direction)(wrong)
