"""Particles against a serial list: each is once on the rank that owns its cell, with its attributes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pytest
from _pytest.monkeypatch import MonkeyPatch
from hypothesis import strategies as st
from mpi4py import MPI

import halox
from halox.errors import ClosedError, FieldError, HaloxError, MismatchError
from tests.mpi.bad_input import Table, check_error, odd_on
from tests.mpi.conftest import agree
from tests.oracle import divide, factorisations
from tests.strategies import on_ranks
from tests.support import trials

pytestmark = pytest.mark.usually(1, 3, 4)

TAG = np.dtype([("a", "i2"), ("b", "f8")], align=True)


class Program(NamedTuple):
    """A grid, the particles of each rank at first, and the largest displacement of each step."""

    blocks: tuple[tuple[int, ...], ...]
    periodic: tuple[bool, ...]
    walls: tuple[tuple[str, str], ...]
    numbers: list[int]
    steps: list[int]
    seed: int


@st.composite
def programs(draw: st.DrawFn, ranks: int) -> Program:
    ndim = draw(st.integers(1, 4))
    procs = draw(st.sampled_from(factorisations(ranks, ndim)))
    if draw(st.booleans()):
        blocks = tuple(tuple(draw(st.integers(1, 3)) for _ in range(p)) for p in procs)
    else:
        blocks = divide([p + draw(st.integers(0, 5)) for p in procs], procs)
    wall = st.sampled_from(["reflect", "absorb"])
    numbers = st.sampled_from([0, 1, 3, 20, 60])
    return Program(
        blocks,
        tuple(draw(st.booleans()) for _ in procs),
        tuple((draw(wall), draw(wall)) for _ in procs),
        [draw(numbers) for _ in range(ranks)],
        draw(st.lists(st.sampled_from([0, 1, 2, 100]), min_size=1, max_size=4)),
        draw(st.integers(0, 99)),
    )


def odd_sixteenths(rng: np.random.Generator, most: int, shape: Any) -> np.ndarray:
    """Return numbers that are never on a wall or between cells; sums of three of them and mirror images are exact."""
    return rng.integers(-8 * most, 8 * most + 1, shape) / 8


def fate(x: float, n: int, periodic: bool, walls: tuple[str, str]) -> tuple[float, int] | None:
    """Return the place and the sign of the velocity of a particle along an axis; None if it is absorbed."""
    sign = 1
    while not -0.5 <= x < n - 0.5:
        if periodic:
            x += n if x < 0 else -n
            continue
        if walls[int(x > 0)] == "absorb":
            return None
        x, sign = (-1 - x if x < 0 else 2 * n - 1 - x), -sign
    return x, sign


def errors(p: halox.Particles, alive: dict[int, Any], blocks: Any, grid: halox.Grid) -> list[Any]:
    """Compare this rank's particles with those of a serial list that are in its block; return what differs."""
    starts = [np.cumsum([0, *sizes]) for sizes in blocks]
    low, high = ([s[c + k] for s, c in zip(starts, grid.proc_coords, strict=True)] for k in (0, 1))
    mine = {
        k: one for k, one in alive.items() if ((one[0] + 0.5 >= low) & (one[0] + 0.5 < high)).all()
    }
    if sorted(p["key"].tolist()) != sorted(mine):
        return [p["key"], [*mine]]
    wrong = []
    for row, key in enumerate(p["key"].tolist()):
        tag = np.array((key, -key), TAG)
        found = (p.position[row], *mine[key]), (p["v"][row], mine[key][1]), (p["tag"][row], tag)
        right = p.position[row] == mine[key][0], p["v"][row] == mine[key][1], p["m"][row] == key
        if not all(map(np.all, right)) or p["tag"][row] != tag:
            wrong.append((key, found))
    return wrong


@on_ranks(programs, trials(60))
def test_random_programs_against_a_serial_list(case: Program, comm: MPI.Intracomm) -> None:
    shape, ndim = [sum(sizes) for sizes in case.blocks], len(case.blocks)
    rng = np.random.default_rng(case.seed)
    total = sum(case.numbers)
    position = odd_sixteenths(rng, 30, (total, ndim)) + 1 / 16
    velocity = rng.integers(-9, 9, (total, ndim)).astype(("f4", ">f8")[case.seed % 2])
    alive: dict[int, Any] = dict(enumerate(zip(position, velocity, strict=True)))

    def settle() -> None:
        for key, (x, v) in list(alive.items()):
            ends = [fate(*one) for one in zip(x, shape, case.periodic, case.walls, strict=True)]
            if None in ends:
                del alive[key]
            else:
                x, sign = np.array(ends).T
                alive[key] = x, v * sign

    with halox.Grid(
        shape,
        blocks=case.blocks,
        proc_shape=[*map(len, case.blocks)],
        periodic=case.periodic,
        device="cpu",
        comm=comm,
    ) as grid:
        first = sum(case.numbers[: comm.rank])
        own = slice(first, first + case.numbers[comm.rank])
        keys = np.arange(total)
        tags = np.zeros(total, TAG)
        tags["a"], tags["b"] = keys, -keys
        p = halox.Particles(
            grid, position[own], walls=case.walls, flip="v", key=keys[own], v=velocity[own]
        )
        settle()
        p["tag"] = tags[p["key"]]
        p["m"] = np.broadcast_to(p["key"][:, None, None], (len(p), 3, 2)).astype(">f4")
        wrong = errors(p, alive, case.blocks, grid)
        for number, most in enumerate(case.steps):
            jumps = odd_sixteenths(rng, most, (total, ndim))
            p.position += jumps[p["key"]]
            p["v"] *= 2
            alive = {key: (x + jumps[key], 2 * v) for key, (x, v) in alive.items()}
            if number % 2:
                p.sort()
            p.migrate()
            settle()
            wrong += errors(p, alive, case.blocks, grid)
            wrong += [] if (found := p.count()) == len(alive) else [found]
        assert not wrong
        assert (grid.owner(np.floor(p.position + 0.5).astype(int)) == grid.rank).all()
        p.sort(order=0)
        cells = np.floor(p.position + 0.5).astype(int) - [cut.start for cut in grid.owned]
        places = np.ravel_multi_index(tuple(cells.T), grid.rank_shape)
        assert (np.diff(places) >= 0).all()
        assert not errors(p, alive, case.blocks, grid)


def test_positions_at_the_ends(comm: MPI.Intracomm) -> None:
    """Cells are half open, and rounding puts no particle beyond the grid."""
    tiny = 2.0**-60
    far = [-0.5, np.nextafter(-0.5, -1), -0.5 - tiny, 0.5, 2.5, np.nextafter(2.5, 0), 1e15, -1e15]
    for periodic, walls in ((True, "keep"), (False, "reflect")):
        options: Any = {"periodic": periodic, "device": "cpu", "comm": comm}
        with halox.Grid((comm.size * 3,), halo=0, **options) as grid:
            p = halox.Particles(grid, far, walls=walls, at=far)
            assert agree(p.count() == len(far) * comm.size, comm)
            cells = np.floor(p.position[:, 0] + 0.5)
            cut = grid.owned[0]
            assert agree(((cells >= cut.start) & (cells < cut.stop)).all(), comm)
            inside = (p["at"] >= -0.5) & (p["at"] < 2.5)
            assert agree((p.position[inside, 0] == p["at"][inside]).all(), comm)


def test_positions_by_dimension_and_attributes(comm: MPI.Intracomm) -> None:
    x = np.array([0.0, 1, 3, 4, 8])
    with halox.Grid((5, 4), coords={"x": x}, device="cpu", comm=comm) as grid:
        at = {"y": [0.5, 1, 2], "x": np.array([0.0, 2, 6])}
        p = halox.Particles(grid, at, w=2, name=[b"a", b"bc", b"d"])
        right = {b"a": [0, 0.5], b"bc": [1.5, 1], b"d": [3.5, 2]}
        assert agree(
            all(right[n] == x for n, x in zip(p["name"], p.position.tolist(), strict=True)), comm
        )
        assert agree(p.count() == 3 * comm.size and (p["w"] == 2).all(), comm)
        p["w"] += 1
        p["new"] = np.zeros((len(p), 2, 0))
        p.position = p.position[::-1] * 0
        p.migrate()
        del p["new"]
        assert agree((p["w"] == 3).all() and len(p) == (3 * comm.size) * (comm.rank == 0), comm)
        assert p.keys() == ["position", "w", "name"]


@pytest.fixture
def folder(comm: MPI.Intracomm) -> Iterator[Path]:
    """A folder of all ranks."""
    with TemporaryDirectory() as made:
        yield Path(comm.bcast(made))
        comm.Barrier()


def test_checkpoints_on_other_ranks(folder: Path, comm: MPI.Intracomm) -> None:
    """Beside a field: on all ranks, and again on half of them; also without particles on ranks, and without any."""
    rng = np.random.default_rng(comm.rank)
    for number, at in enumerate((rng.random((40 * (comm.rank != 1), 2)) * (8, 6) - 0.5, [])):
        path, half = folder / f"{number}.zarr", comm.Split(comm.rank % 2)
        with halox.Grid((8, 6), device="cpu", comm=comm) as grid:
            p = halox.Particles(grid, at, n=comm.rank)
            p["tag"] = np.zeros(len(p), TAG)
            p["tag"]["b"] = p.position[:, 0]
            p["v"] = p.position[:, :, None] * [1, 2, 3]
            grid.save(path, u=grid.ones(), p=p, attrs={"step": 3})
            assert agree(sorted(grid.load(path)) == ["p", "u"], comm)
            there = comm.allgather({name: p[name] for name in p})
        for ranks in (comm, half):
            with halox.Grid((8, 6), device="cpu", comm=ranks) as grid:
                loaded = grid.load(path, names="p")
                q = halox.Particles(grid, walls="absorb", **loaded["p"])
                assert loaded.attrs == {"step": 3} and {*q} == {"position", "n", "tag", "v"}
                here = ranks.allgather({name: q[name] for name in q})
            for name in ("position", "n", "tag", "v"):
                rows, right = (
                    sorted(str(row.tolist()) for one in each for row in one[name])
                    for each in (here, there)
                )
                assert agree(rows == right, comm), name
                assert here[0][name].dtype == there[0][name].dtype
            owned = grid.owner(np.floor(q.position + 0.5).astype(int)) == grid.rank
            assert agree(owned.all(), comm)
        half.Free()


def test_nothing_moves_after_an_error_of_one_rank(comm: MPI.Intracomm) -> None:
    """Also if a rank has no memory, or an attribute that other ranks lack; then migrate as usual."""
    with halox.Grid((3 * comm.size, 4), periodic=(True, False), device="cpu", comm=comm) as grid:
        start = np.array([[3.0 * comm.rank, 1], [3.0 * comm.rank + 2, 3]])
        p = halox.Particles(grid, start, key=[0, 1])
        p.position[:, 0] += 2
        moved, last = p.position.copy(), comm.rank == comm.size - 1
        for bad in (np.nan, np.inf, 1e17, -0.75):
            p.position[1, 1] = bad if last else 3
            with pytest.raises(FieldError, match="particle 1"):
                p.migrate()
        p.position[1, 1] = 3
        with MonkeyPatch.context() as patch:
            if last:
                patch.setattr(np, "concatenate", out_of_memory)
            with pytest.raises(HaloxError, match="MemoryError"):
                p.migrate()
        if last and comm.size > 1:
            p["more"] = 1
            with pytest.raises(MismatchError, match="more"):
                p.migrate()
            del p["more"]
        elif comm.size > 1:
            with pytest.raises(MismatchError, match="more"):
                p.migrate()
        assert agree((p.position == moved).all() and p["key"].tolist() == [0, 1], comm)
        p.migrate()
        assert agree(p.count() == 2 * comm.size, comm)


def out_of_memory(*_: object) -> None:
    raise MemoryError


def on_grid(call: Any) -> Any:
    """Return a call with a grid, particles in two of its cells on each rank, and a function of the odd rank."""

    def run(comm: MPI.Intracomm) -> None:
        with halox.Grid((8, 6), device="cpu", comm=comm) as grid:
            at = [(1.0, 1.0), (2.0, 2.0)]
            call(grid, halox.Particles(grid, at, v=np.ones((2, 2))), odd_on(comm))

    return run


NAN = [(np.nan, 1)]
FIELD_ERRORS: dict[str, tuple[Any, str]] = {
    "another number of axes": (lambda g, p, odd: halox.Particles(g, odd([[1]], [[1, 2]])), "posi"),
    "NaN": (lambda g, p, odd: halox.Particles(g, odd(NAN, [[1, 2]])), "particle 0"),
    "beyond a wall": (lambda g, p, odd: halox.Particles(g, [(1, odd(5.5, 1))]), "wall"),
    "complex": (lambda g, p, odd: halox.Particles(g, [(1, 1j)]), "position"),
    "objects": (lambda g, p, odd: halox.Particles(g, [(1, 1)], v=[odd(None, 1)]), "v: "),
    "ragged": (lambda g, p, odd: halox.Particles(g, [(1, 1)], v=[[1, 2], [1]]), "v: "),
    "masked": (lambda g, p, odd: halox.Particles(g, np.ma.ones((1, 2))), "masked"),
    "another length": (lambda g, p, odd: halox.Particles(g, [(1, 1)], v=odd([1, 2], [1])), "v: "),
    "faces": (lambda g, p, odd: halox.Particles(g, {"x_face": 1, "y": 1}), "faces"),
    "a dimension missing": (lambda g, p, odd: halox.Particles(g, {"x": 1}), "x, y"),
    "unknown walls": (lambda g, p, odd: halox.Particles(g, [(1, 1)], walls="open"), "walls"),
    "walls of one axis": (lambda g, p, odd: halox.Particles(g, [(1, 1)], walls=["keep"]), "walls"),
    "wrapping walls": (lambda g, p, odd: halox.Particles(g, [(1, 1)], walls="wrap"), "walls"),
    "nothing to flip": (lambda g, p, odd: halox.Particles(g, [(1, 1)], flip="v"), "flip"),
    "flipped text": (lambda g, p, odd: halox.Particles(g, [(1, 1)], flip="v", v=b"a"), "flip"),
    "an assigned shape": (lambda g, p, odd: p.__setitem__("v", np.ones((3, 7))), "v"),
    "no position": (lambda g, p, odd: p.__delitem__("position"), "position"),
    "in a .npy file": (lambda g, p, odd: g.save("particles.npy", p=p), ".npy"),
    "twice in a checkpoint": (
        lambda g, p, odd: g.save("particles.zarr", {"p.v": g.ones()}, p=p),
        "p.v",
    ),
    "another grid's particles": (
        lambda g, p, odd: halox.Grid((8, 6), device="cpu", comm=g.comm).save("a.zarr", p=p),
        "this grid",
    ),
    "owner of fractions": (lambda g, p, odd: g.owner([(1.5, 1)]), "cells"),
    "owner of other axes": (lambda g, p, odd: g.owner([1, 2, 3]), "cells"),
}
MISMATCHES: dict[str, tuple[Any, str]] = {
    "unlike names": (lambda g, p, odd: halox.Particles(g, [(1, 1)], **{odd("a", "b"): 1}), "attri"),
    "unlike dtypes": (lambda g, p, odd: halox.Particles(g, [(1, 1)], v=odd(1, 1.0)), "attributes"),
    "unlike walls": (
        lambda g, p, odd: halox.Particles(g, [(1, 1)], walls=odd("absorb", "keep")),
        "walls",
    ),
    "an attribute of one rank": (
        lambda g, p, odd: (p.__setitem__(odd("w", "u"), 1), p.migrate()),
        "attributes",
    ),
    "other calls": (lambda g, p, odd: odd(p.migrate, p.count)(), "count"),
}
TABLE: Table = {
    **{name: (on_grid(call), FieldError, word) for name, (call, word) in FIELD_ERRORS.items()},
    **{f"{k} >1": (on_grid(call), MismatchError, word) for k, (call, word) in MISMATCHES.items()},
    "without a grid": (lambda _: halox.Particles((8, 6), [(1, 1)]), HaloxError, "grid"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", TABLE)
def test_bad_input(name: str, comm: MPI.Intracomm) -> None:
    check_error(TABLE, name, comm)


def test_particles_of_a_closed_grid(comm: MPI.Intracomm) -> None:
    grid = halox.Grid((8, 6), device="cpu", comm=comm)
    p = halox.Particles(grid, [(1, 1)])
    grid.close()
    for call in (p.migrate, p.count, lambda: halox.Particles(grid, [(1, 1)])):
        with pytest.raises(ClosedError):
            call()
    assert agree(len(p) in (0, comm.size), comm), "arrays stay"
