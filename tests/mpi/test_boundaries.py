"""Boundaries: halos at walls, functions, overlapped and deep loops; test_exchange.py has random fields at walls."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any, Literal

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import (
    ExchangeTimeoutError,
    FieldError,
    HaloxError,
    MismatchError,
    StateError,
)
from tests.mpi.bad_input import raised_by_all
from tests.mpi.conftest import agree
from tests.mpi.limits import short_waits
from tests.oracle import allocated

pytestmark = [pytest.mark.geometry, pytest.mark.filterwarnings("ignore:boundary:UserWarning")]

SEED = 20261124
UNTOUCHED = -77


@pytest.mark.usually(3)
@pytest.mark.parametrize(("dtype", "extent"), [("f4", 4), ("i8", 8)])
def test_opposite_signs_of_components(dtype: str, extent: int, comm: MPI.Intracomm) -> None:
    """Cells at strides that NumPy 2.4 negates wrongly."""
    boundary = {0: ("antisymmetric", "antireflect"), (): "symmetric"}
    with halox.Grid((4 * comm.size, 6), comm=comm, device="cpu") as grid:
        u = grid.zeros(dtype, components=(..., extent), boundary=boundary)
        i, j = grid.indices()
        grid.interior(u)[..., 0] = 10 * i + j + 1
        grid.exchange(u)
        one, right = u[..., 0], [True]
        if grid.at_wall(0, "low"):
            right += [np.array_equal(one[0, 1:-1], -one[1, 1:-1])]
        if grid.at_wall(1, "low"):
            right += [np.array_equal(one[1:-1, 0], -one[1:-1, 2])]
        assert agree(all(right), comm)


@pytest.mark.usually(3)
@pytest.mark.parametrize("dtype", ["u4", "i1"])
def test_gradients_of_small_integers(dtype: str, comm: MPI.Intracomm) -> None:
    """The numbers beyond a wall are differences and sums of the dtype, which wrap around."""
    with halox.Grid((4 * comm.size, 2), halo=3, comm=comm, device="cpu") as grid:
        u = grid.full(7, dtype, boundary=(None, ("gradient", 3)))
        grid.exchange(u)
        expected = np.array([-2, 1, 4, 7, 7, 10, 13, 16]).astype(dtype)
        assert agree((u[3:-3] == expected).all(), comm)


@pytest.mark.parametrize("dtype", ["f2", "f8", "?", "i4,f8", "S24"])
def test_copies_keep_all_bytes(dtype: str, comm: MPI.Intracomm) -> None:
    """Signs of zeros, payloads of NaNs, bytes behind zeros, in periodic halos and beyond walls."""
    shape = (4 * comm.size, 5, 6)
    sides = (("symmetric", "edge"), None, "reflect")
    with halox.Grid(
        shape, halo=2, periodic=(0, 1, 0), boundary=sides, comm=comm, device="cpu"
    ) as grid:
        u = grid.zeros(dtype)
        raw = np.random.default_rng(SEED).integers(0, 256, (*shape, u.itemsize), np.uint8)
        raw[raw % 3 == 0] = 0
        whole = (raw & 1 if dtype == "?" else raw).view(u.dtype)[..., 0]
        grid.interior(u)[...] = whole[grid.owned]
        grid.exchange(u)
        number = np.arange(whole.size).reshape(shape)
        number = np.pad(number, ((0, 0), (2, 2), (0, 0)), mode="wrap")
        number = np.pad(number, ((2, 0), (0, 0), (0, 0)), mode="symmetric")
        number = np.pad(number, ((0, 2), (0, 0), (0, 0)), mode="edge")
        number = np.pad(number, ((0, 0), (0, 0), (2, 2)), mode="reflect")
        cut = tuple(slice(at.start, at.stop + 4) for at in grid.owned)
        assert agree(u.tobytes() == whole.ravel()[number[cut]].tobytes(), comm)


@pytest.mark.usually(3)
@pytest.mark.parametrize("mode", ["edge", "reflect", "antisymmetric"])
def test_offsets_in_halos_wider_than_blocks(mode: Any, comm: MPI.Intracomm) -> None:
    """The cells at the offsets from owned cells, along each axis, are those of `numpy.pad` of the whole field."""
    whole = np.random.default_rng(SEED).integers(-99, 100, (max(4, comm.size), 5))
    options: Any = {"halo": 3, "proc_shape": (comm.size, 1), "comm": comm, "device": "cpu"}
    with halox.Grid(whole.shape, **options) as grid:
        u = grid.full(UNTOUCHED, "i8", offsets=(1, 3), boundary=mode)
        grid.interior(u)[...] = whole[grid.owned]
        grid.exchange(u)
        right = []
        for axis in (0, 1):
            widths = [(3, 3) if axis == other else (0, 0) for other in (0, 1)]
            padded = np.pad(whole, widths, mode=mode.removeprefix("anti"))
            if mode == "antisymmetric":
                padded.swapaxes(0, axis)[:3] *= -1
                padded.swapaxes(0, axis)[-3:] *= -1
            for offset in (-3, -1, 1, 3):
                by = [offset * (axis == other) for other in (0, 1)]
                mine = [slice(3 + k, 3 + k + n) for k, n in zip(by, grid.rank_shape, strict=True)]
                there = [
                    slice(low + k + at.start, low + k + at.stop)
                    for (low, _), k, at in zip(widths, by, grid.owned, strict=True)
                ]
                right.append(np.array_equal(u[tuple(mine)], padded[tuple(there)]))
        assert agree(all(right), comm), right


@pytest.mark.usually(3)
def test_new_arrays_and_inferred_layouts(comm: MPI.Intracomm) -> None:
    """Arrays that the grid did not make have the grid's boundary, at each address."""
    whole = np.random.default_rng(SEED).random((5 * comm.size, 6))
    padded = np.pad(whole, ((1, 1), (0, 0)), mode="reflect")
    padded = np.pad(padded, ((0, 0), (1, 1)), constant_values=2.0)
    sides: Any = ("reflect", ("constant", 2.0))
    with halox.Grid(whole.shape, boundary=sides, comm=comm, device="cpu") as grid:
        cut = tuple(slice(at.start, at.stop + 2) for at in grid.owned)
        arrays = [np.zeros(grid.padded_shape) for _ in range(3)]
        for u in arrays:
            grid.interior(u)[...] = whole[grid.owned]
            grid.exchange(u)
        assert agree(all(np.array_equal(u, padded[cut]) for u in arrays), comm)


def test_a_function_fills_the_slabs(comm: MPI.Intracomm) -> None:
    """A function gets the slab, the axis, the side and the global indices, at the walls alone."""
    shape = (4 * comm.size, 5)
    sides = []

    def inflow(slab: Any, axis: int, side: str, indices: tuple[Any, ...]) -> None:
        sides.append((axis, side))
        slab[...] = 100 * indices[0] + indices[1]

    with halox.Grid(
        shape, boundary=((inflow, "edge"), None), comm=comm, device="cpu", proc_shape=(comm.size, 1)
    ) as grid:
        u = grid.zeros()
        grid.exchange(u)
        expected = np.arange(5) - 100.0
        assert agree(comm.rank > 0 or np.array_equal(u[0, 1:-1], expected), comm)
        assert agree(set(sides) == ({(0, "low")} if comm.rank == 0 else set()), comm)


@pytest.mark.parametrize("allocation", ["grid", "C", "turned", "backwards", "part"])
def test_a_function_gets_its_field(allocation: str, comm: MPI.Intracomm) -> None:
    """A function with five parameters gets the array of the call, whichever it is; its layout is that of the field."""
    right = []

    def outflow(slab: Any, axis: int, side: str, indices: Any, field: Any) -> None:
        layers, end = grid.interior(field).swapaxes(0, 1), 0
        if side == "high":
            layers, end = layers[::-1], grid.grid_shape[0] - 1
        slab[...] = layers[0, :, None] + abs(indices[0] - end) * (layers[0] - layers[1])[:, None]

    def scaled(slab: Any, axis: int, side: str, indices: Any, scale: float = 2.0) -> None:
        right.append(scale == 2.0)

    options: Any = {"proc_shape": (comm.size, 1), "comm": comm, "device": "cpu"}
    with halox.Grid((3 * comm.size, 8), halo=2, **options) as grid:
        plain: Any = {"components": 2, "boundary": (outflow, None)}
        arrays = [grid.zeros("f8", **plain) for _ in range(3)]
        if allocation != "grid":
            arrays = [grid.declare(allocated(grid, one, allocation), **plain) for one in arrays]
        v, w = grid.zeros(components=2, boundary=("extrapolate", None)), grid.zeros(boundary=scaled)
        for number, u in enumerate(arrays):
            values = np.random.default_rng([number, comm.rank]).integers(-9, 10, u.shape)
            u[...], v[...] = values, values
            grid.exchange(u, w)
            grid.exchange(v)
            right.append(np.array_equal(u, v))
        assert agree(all(right), comm), right


def test_walls_of_a_rank(comm: MPI.Intracomm) -> None:
    with halox.Grid(
        (4 * comm.size, 6),
        halo=2,
        periodic=(False, True),
        comm=comm,
        device="cpu",
        proc_shape=(comm.size, 1),
    ) as grid:
        ends = (comm.rank == 0, comm.rank == comm.size - 1)
        assert (grid.at_wall(0, "low"), grid.at_wall(0, "high")) == ends
        assert not grid.at_wall(1, "low") and not grid.at_wall(-1, "high")
        assert (grid.at_wall("x", "low"), grid.at_end("x", "high")) == ends
        assert grid.at_end("y", "low") and grid.at_end(-1, "high") and not grid.at_wall("y", "low")
        names = zip(("low", "high"), ends, strict=True)
        assert grid.walls == tuple((0, side) for side, is_wall in names if is_wall)
        u = grid.zeros(components=3)
        view = grid.wall(u, "x", "high", depth=2)
        assert view.shape == (3, 2 * ends[1], 6)
        view[...] = 1
        assert grid.sum(u) == 3 * 2 * 6
        assert grid.wall(u, 0, "low", halo=True).shape == (3, 3 * ends[0], 10)
        assert np.shares_memory(view, u) or not ends[1]
        with pytest.raises(FieldError, match="side"):
            grid.at_wall(0, "left")  # type: ignore[arg-type]
        for axis in (2, "z"):
            for find in (grid.at_wall, grid.at_end, lambda *wall: grid.wall(u, *wall)):
                with pytest.raises(FieldError, match="axis: the grid axes are 'x', 'y'"):
                    find(axis, "low")


@pytest.mark.usually(2)
def test_swapped_boundaries_of_ranks_are_one_error(comm: MPI.Intracomm) -> None:
    with pytest.raises(MismatchError, match="boundary"):
        halox.Grid(
            (8 * comm.size, 6),
            boundary="edge" if comm.rank else "reflect",
            comm=comm,
            device="cpu",
        )
    with halox.Grid((8 * comm.size, 6), comm=comm, device="cpu") as grid:
        u = grid.zeros()
        grid.declare(u, boundary=("constant", float(comm.rank)))
        with pytest.raises(MismatchError, match="constant"):
            grid.exchange(u)


@pytest.mark.usually(2)
def test_a_function_that_raises_on_one_rank(comm: MPI.Intracomm) -> None:
    """The error of the first call is raised on all ranks."""

    def wrong(slab: Any, axis: int, side: str, indices: tuple[Any, ...]) -> None:
        raise ValueError("no inflow given")

    with halox.Grid(
        (4 * comm.size, 6),
        boundary=((wrong, None), None),
        comm=comm,
        device="cpu",
        proc_shape=(comm.size, 1),
    ) as grid:
        u = grid.zeros()
        with pytest.raises(HaloxError, match="ValueError: no inflow given"):
            grid.exchange(u)


def test_a_function_that_raises_later_ends_the_calls_of_all_ranks(comm: MPI.Intracomm) -> None:
    """Also if it raises an error of halox, which at other places all ranks raise."""
    step = 0

    def wrong(slab: Any, axis: int, side: str, indices: tuple[Any, ...]) -> None:
        if step:
            grid.interior(slab)

    with short_waits(), pytest.raises(HaloxError) as raised:
        grid = halox.Grid((4 * comm.size, 6), comm=comm, device="cpu", proc_shape=(comm.size, 1))
        u = grid.zeros(boundary=((wrong, None), None))
        grid.exchange(u)
        step = 1
        grid.exchange(u)
        grid.sum(u)
    expected = FieldError if comm.rank == 0 else ExchangeTimeoutError
    assert agree(type(raised.value) is expected, comm)


@pytest.mark.usually(1, 2)
@pytest.mark.parametrize("first", [True, False])
def test_a_function_makes_no_collective_call(first: bool, comm: MPI.Intracomm) -> None:
    """The error names the function, and no other thread."""
    step = int(first)

    def wrong(slab: Any, axis: int, side: str, indices: tuple[Any, ...]) -> None:
        if step:
            slab[...] = grid.sum(u)

    with halox.Grid((4 * comm.size, 6), comm=comm, device="cpu", proc_shape=(1, 0)) as grid:
        u = grid.zeros(boundary=((wrong, None), None))
        if not first:
            grid.exchange(u)
        step = 1
        with pytest.raises(StateError, match="boundary function"):
            grid.exchange(u)


@pytest.mark.usually(3)
@pytest.mark.parametrize("way", ["zeros", "declare"])
def test_functions_made_anew_are_not_kept(way: str, comm: MPI.Intracomm) -> None:
    functions: list[weakref.ref[Any]] = []

    def new(number: int) -> Any:
        def fill(slab: Any, axis: int, side: str, indices: tuple[Any, ...]) -> None:
            slab[...] = number

        functions.append(weakref.ref(fill))
        return fill

    with halox.Grid((4 * comm.size, 6), comm=comm, device="cpu") as grid:
        u = grid.zeros()
        for number in range(9):
            if way == "zeros":
                u = grid.zeros(boundary=new(number))
            else:
                grid.declare(u, boundary=new(number))
            grid.exchange(u)
            assert not grid.at_wall(1, "low") or (u[1:-1, 0] == number).all()
            grid.sum(u)
            grid.sum("u + 1", u=u)
        del u
        grid.exchange(grid.zeros())  # closes the plans of collected fields
        gc.collect()
        assert agree(sum(one() is not None for one in functions) < 5, comm)


@pytest.mark.parametrize("axis", [0, 1])
def test_indices_of_a_function_wrap_along_periodic_axes(axis: int, comm: MPI.Intracomm) -> None:
    """A deep halo is filled by the global indices of its cells, so that steps have the bits of single exchanges."""
    seen = []

    def fill(slab: Any, axis: int, side: str, indices: tuple[Any, ...]) -> None:
        seen.append(indices[1])
        slab[...] = np.sin(indices[1]) + 0 * indices[0]

    options: dict[str, Any] = {"periodic": (False, True), "boundary": (fill, None), "halo": 2}
    options["proc_shape"] = (1, comm.size) if axis else (comm.size, 1)
    with halox.Grid((4 * comm.size, 6), comm=comm, device="cpu", **options) as grid:
        u, v, w = (grid.random(1) for _ in range(3))

        def step(new: Any, old: Any, cells: Any) -> None:
            at = [old[cells.shifted(*by)] for by in ((1, 0), (-1, 0), (0, 1), (0, -1))]
            new[cells] = at[0] + 2 * at[1] + 3 * at[2] + 4 * at[3]

        single, deep = grid.plan(u), grid.plan(u, every=2)
        for _ in range(2):
            for cells in single.steps(v):
                step(w, v, cells)
            v, w = w, v
        result, (v, w) = v.copy(), (grid.random(1), w)
        for cells in deep.steps(v):
            step(w, v, cells)
            v, w = w, v
            deep.fill_walls(v)
        assert agree(np.array_equal(grid.interior(v), grid.interior(result)), comm)
        assert agree(all(((index >= 0) & (index < 6)).all() for index in seen), comm)


@pytest.mark.usually(3)
@pytest.mark.parametrize("dtype", [">f8", ">i4"])
def test_accumulate_in_another_byte_order(dtype: str, comm: MPI.Intracomm) -> None:
    for kind in ("edge", "symmetric", "extrapolate", ("gradient", 2)):
        with halox.Grid((4 * comm.size, 6), boundary=kind, halo=2, comm=comm, device="cpu") as grid:
            u, v = grid.zeros(dtype), grid.zeros(np.dtype(dtype).newbyteorder("="))
            for field in (u, v):
                field[...] = np.arange(field.size).reshape(field.shape) % 7
                grid.accumulate(field)
            assert agree(np.array_equal(u, v) and grid.interior(u).any(), comm), kind


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"boundary": "mirror"}, {}),
        ({"boundary": 0.0}, {}),
        ({"boundary": ("edge",) * 3}, {}),
        ({"boundary": ("edge", None), "periodic": (True, False)}, {}),
        ({"boundary": (("periodic", "edge"), None)}, {}),
        ({"boundary": {0: "edge"}}, {}),
        ({"boundary": ("constant", "x")}, {}),
        ({}, {"boundary": "periodic"}),
        ({}, {"boundary": {1: "edge"}}),
        ({}, {"boundary": {"u": "edge"}}),
        ({}, {"parity": "even", "boundary": "edge"}),
        ({"periodic": True}, {"boundary": ("phase", 1j)}),
        ({"periodic": True}, {"boundary": ("phase", 0)}),
        ({}, {"boundary": "antisymmetric", "dtype": "u4"}),
        ({}, {"boundary": ("constant", 1j)}),
        ({}, {"boundary": ("gradient", 0.5), "dtype": "i4"}),
        ({"shape": (3, 3), "halo": 3}, {"boundary": (("reflect", "edge"), None)}),
        (
            {"shape": (2, 3), "halo": 3},
            {"boundary": (("antisymmetric", ("antisymmetric", 1)), None)},
        ),
        ({"shape": (1, 3)}, {"boundary": ("antireflect", None)}),
        ({"shape": (1, 4)}, {"boundary": "extrapolate"}),
    ],
)
@pytest.mark.usually(2)
def test_bad_input(options: dict[str, Any], field: dict[str, Any], comm: MPI.Intracomm) -> None:
    """The same error on all ranks, at the latest by the first exchange."""
    shape = options.pop("shape", (4 * comm.size, 6))
    if "halo" in options or shape[0] == 1:
        comm = MPI.COMM_SELF
    with (
        pytest.raises(FieldError, match=r"boundary|parity"),
        halox.Grid(shape, comm=comm, device="cpu", **options) as grid,
    ):
        u = grid.zeros(field.pop("dtype", "f8"), **field)
        grid.exchange(u)


@pytest.mark.usually(2)
@pytest.mark.parametrize(
    ("word", "boundary"),
    [
        ("Dirichlet", "antisymmetric"),
        ("neumann", "symmetric"),
        ("wall", "antisymmetric"),
        ("zero", "constant"),
        (0.0, ("constant", 0.0)),
        (np.float32(2), ("antisymmetric", 2.0)),
    ],
)
def test_words_of_other_programs(word: Any, boundary: Any, comm: MPI.Intracomm) -> None:
    """The error has the boundary that does the same."""
    with halox.Grid((4 * comm.size, 6), comm=comm, device="cpu") as grid:
        text = str(boundary).replace("'", '"') if isinstance(boundary, tuple) else f'"{boundary}"'
        raised_by_all(comm, FieldError, text, lambda: grid.zeros(boundary=(word, None)))


@pytest.mark.usually(2)
@pytest.mark.parametrize("axis", [0, 1])
def test_mirrors_outside_the_wall_of_a_staggered_field_warn(axis: int, comm: MPI.Intracomm) -> None:
    """The warning names the boundary that mirrors on the wall."""
    sides = ("symmetric", "antisymmetric")
    with halox.Grid((4 * comm.size, 6), boundary=sides, comm=comm, device="cpu") as grid:
        with pytest.warns(UserWarning, match=("'reflect'", "'antireflect'")[axis]):
            grid.exchange(grid.zeros(staggered=axis))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            grid.exchange(grid.zeros())
            grid.exchange(grid.zeros(staggered=axis, boundary=("reflect", "antireflect")))


@pytest.mark.usually(2)
def test_a_function_has_no_adjoint(comm: MPI.Intracomm) -> None:
    with halox.Grid((4 * comm.size, 6), comm=comm, device="cpu") as grid:
        u = grid.zeros(boundary=lambda *_: None)
        with pytest.raises(FieldError):
            grid.accumulate(u)


def has_the_bits_of_single_steps(
    sides: Any, comm: MPI.Intracomm, device: Literal["cpu", "gpu"]
) -> bool:
    """Whether owned cells have the same bits with an exchange for each step, for two and for three steps.

    Between exchanges the walls are filled after each step.
    """
    shape = (9 * comm.size, 11, 8)
    boundary = (sides, ("edge", ("gradient", 0.5)), None)
    results = []
    for every in (1, 2, 3):
        with halox.Grid(
            shape, halo=every, boundary=boundary, periodic=(0, 0, 1), comm=comm, device=device
        ) as grid:
            u, v = grid.full(0.5), grid.full(0.5)  # the value beyond walls without a boundary
            i, j, k = grid.indices()
            grid.interior(u)[...] = grid.xp.sin(i) + grid.xp.cos(2 * j) * k
            plan = grid.plan(u, every=every)
            for _ in range(6 // every):
                for cells in plan.steps(u):
                    v[cells] = u[cells] / 2
                    for by in np.eye(3, dtype=int).tolist():
                        back = [-n for n in by]
                        v[cells] += (u[cells.shifted(*by)] + u[cells.shifted(*back)]) / 12
                    u, v = v, u
                    plan.fill_walls(u)
            inside = grid.interior(u)
            results.append(inside.copy() if device == "cpu" else inside.get())
    assert np.isfinite(results[0]).all()
    return all(np.array_equal(results[0], other) for other in results[1:])


@pytest.mark.usually(3)
@pytest.mark.parametrize("sides", ["reflect", "extrapolate", ("antisymmetric", 2.0)])
def test_several_steps_for_one_exchange(sides: Any, comm: MPI.Intracomm) -> None:
    assert agree(has_the_bits_of_single_steps(sides, comm, "cpu"), comm)


@pytest.mark.usually(2)
def test_walls_are_not_filled_during_an_exchange(comm: MPI.Intracomm) -> None:
    with halox.Grid((4 * comm.size, 6), boundary="edge", comm=comm, device="cpu") as grid:
        u = grid.ones()
        plan = grid.plan(u)
        plan.start()
        with pytest.raises(StateError):
            plan.fill_walls()
        plan.finish()
        u[grid.layout(u).interior] = 2
        plan.fill_walls()
        beyond = [u[0, 1:-1] if grid.at_wall(0, "low") else u[1:-1, 0], u[1:-1, -1]]
        assert agree(all((part == 2).all() for part in beyond), comm)


def test_fills_of_walls_leave_received_halos_with_their_signs_and_phases(
    comm: MPI.Intracomm,
) -> None:
    right, fold = [], {(0, "high"): halox.Connection(flip=1)}
    options: dict[str, Any] = {"comm": comm, "device": "cpu", "periodic": (False, True)}
    with halox.Grid((8, 12), connect=fold, **options) as grid:
        u = grid.full(1.0, sign=-1, boundary=(("edge", None), None))
        plan = grid.plan(u)
        plan()
        grid.interior(u)[...] = 2
        plan.fill_walls()
        right += [not grid.at_wall(0, "low") or (u[0, 1:-1] == 2).all()]
        right += [grid.owned[0].stop < 8 or (u[-1, 1:-1] == -1).all()]
    with halox.Grid((8, 12), **options) as grid:
        z = grid.full(1, "c16", boundary=("edge", ("phase", 1j)))
        plan = grid.plan(z)
        plan()
        before = z[1:-1, [0, -1]].copy()
        plan.fill_walls()
        right += [(z[1:-1, [0, -1]] == before).all()]
    assert agree(all(right), comm)
