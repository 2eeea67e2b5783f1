"""The staggered-fermion mini-app on any division of its lattice: MILC's sample, closed forms, and one rank's bits."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from apps.milc import benchmark, checks, gauge, links, options, random_fields, scidac
from apps.milc.cg import Solution, Stop, solve
from apps.milc.lattice import EVEN, ODD, PARITIES, Lattice
from apps.milc.operator import Staggered
from tests.mpi import whole_lattice
from tests.mpi.conftest import agree
from tests.support import full, milc_data

pytestmark = pytest.mark.usually(2)

SHAPE = (12, 6, 6, 6)
"""Sites along t, z, y and x; 1 to 4, 6 and 8 ranks can divide them with three sites or more per rank."""

WHOLE = tuple(slice(0, n) for n in SHAPE)
TOLERANCE = {"single": 2e-6, "double": 2e-15}
MILC_SIZES = pytest.mark.ranks(1, 2, 4, 8)
"""8 sites are too few for three ranks of three sites each."""
PRECISIONS = ["double", "single"]

SAMPLE = 8, 8, 8, 8
PLAQUETTES = 2.6203978710714737, 2.6214473754080179
HISTORIES = {
    EVEN: (1.309797014e-01, 2.810117819e-02, 7.919922304e-03),
    ODD: (1.333047318e-01, 2.839108708e-02, 8.035969987e-03),
}


def settings(*words: str) -> options.Settings:
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    return options.settings(parser.parse_args(words))


@cache
def kept_links() -> np.ndarray:
    return random_fields.random_matrices(SHAPE, WHOLE, 4, 3, random_fields.LINKS)


def whole_links() -> np.ndarray:
    return kept_links().copy()


def whole_vectors() -> np.ndarray:
    return random_fields.random_vectors(SHAPE, WHOLE, 3, random_fields.SOURCE)


def operator_of(
    lattice: Lattice, whole: np.ndarray, naive: bool, precision: str = "double"
) -> Staggered:
    """Make the operator from the thin links of the whole lattice."""
    block = np.ascontiguousarray(whole[lattice.owned])
    found = links.of_thin(lattice, block, naive=naive)
    return Staggered(lattice, links.tables(lattice, found, options.DTYPES[precision]))


def applied(operator: Staggered, whole: np.ndarray) -> np.ndarray:
    """Return this rank's block of D psi, on both parities."""
    lattice = operator.lattice
    psi = checks.vectors(operator, np.ascontiguousarray(whole[lattice.owned]))
    even = lattice.values(operator.dslash(psi[ODD], EVEN)).copy()
    return lattice.join(even, lattice.values(operator.dslash(psi[EVEN], ODD)))


def outside_sites(lattice: Lattice, parity: int) -> int:
    """Count the sites of a parity outside this rank's block that D reads, 1 or 3 sites away from a site inside."""
    sites = np.indices(lattice.grid.rank_shape).sum(axis=0)
    sites += sum(part.start for part in lattice.owned)
    outside = np.zeros([n + 6 for n in sites.shape], bool)
    inside = tuple(slice(3, 3 + n) for n in sites.shape)
    for axis in range(4):
        for distance in (-1, 1) if lattice.depth == 1 else (-3, -1, 1, 3):
            there = list(inside)
            there[axis] = slice(3 + distance, 3 + distance + sites.shape[axis])
            outside[tuple(there)] |= sites % 2 != parity
    outside[inside] = False
    return int(outside.sum())


def assembled(lattice: Lattice, block: np.ndarray) -> np.ndarray | None:
    """Assemble the blocks of all ranks on rank 0; return None elsewhere."""
    found = lattice.grid.comm.gather((lattice.owned, block))
    if found is None:
        return None
    whole = np.empty((*lattice.shape, *block.shape[4:]), block.dtype)
    for owned, part in found:
        whole[owned] = part
    return whole


def error(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest error, relative to the largest number."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.fixture(params=[False, True], ids=["improved", "naive"])
def naive(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def lattice(naive: bool, comm: MPI.Intracomm) -> Iterator[Lattice]:
    with Lattice(SHAPE, 1 if naive else 3, comm) as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path, comm: MPI.Intracomm) -> Path:
    """One folder for all ranks."""
    return Path(comm.bcast(str(tmp_path)))


def failure(work: Callable[[], object], comm: MPI.Intracomm) -> str:
    """Return the text of the error, which all ranks must raise."""
    with pytest.raises(halox.HaloxError) as caught:
        work()
    text = str(caught.value)
    assert agree(text == comm.bcast(text), comm)
    return text


def check_definition_and_bits(lattice: Lattice, precision: str, comm: MPI.Intracomm) -> None:
    """Compare D with its definition on the whole lattice, and with the bits of one rank."""
    naive, whole, psi = lattice.depth == 1, whole_links(), whole_vectors()
    found = assembled(lattice, applied(operator_of(lattice, whole, naive, precision), psi))
    ok = True
    if found is not None:
        expected = whole_lattice.dslash(psi, whole, naive=naive)
        with Lattice(SHAPE, lattice.depth, MPI.COMM_SELF, lattice.grid.device) as alone:
            same = applied(operator_of(alone, whole, naive, precision), psi)
        ok = (
            found.dtype == options.DTYPES[precision]
            and error(found, expected) < TOLERANCE[precision]
            and np.array_equal(found, same)
        )
    assert agree(ok, comm)


def check_bytes(lattice: Lattice, comm: MPI.Intracomm) -> None:
    """Assert that an exchange receives no byte that D does not read."""
    for parity in PARITIES:
        field = lattice.vectors(np.dtype(complex), parity, halo=True)
        rows = lattice.grid.explain(field).rows
        received = sum(row.nbytes for row in rows if row.direction == "receive")
        assert agree(received == 48 * outside_sites(lattice, parity) > 0, comm)


class TestOperator:
    @pytest.mark.parametrize("precision", PRECISIONS)
    @pytest.mark.usually(2, 4)
    def test_definition_and_the_bits_of_one_rank(
        self, lattice: Lattice, precision: str, comm: MPI.Intracomm
    ) -> None:
        check_definition_and_bits(lattice, precision, comm)

    def test_plaquettes(self, lattice: Lattice) -> None:
        whole = whole_links()
        found = gauge.plaquettes(lattice, np.ascontiguousarray(whole[lattice.owned]))
        assert found == pytest.approx(whole_lattice.plaquettes(whole), abs=1e-14)

    def test_eigenvalues_of_unit_links(self, lattice: Lattice, naive: bool) -> None:
        waves = (3, 1, 2, 5)
        unit = np.zeros((*SHAPE, 4, 3, 3), complex)
        unit[...] = np.eye(3)
        operator = operator_of(lattice, unit, naive)
        assert gauge.plaquettes(lattice, gauge.gauge_field(lattice, "unit", 0)) == (3, 3)
        expected = 0.0
        for wave, n, shift in zip(waves, SHAPE[::-1], (0, 0, 0, 1), strict=True):
            p = (2 * wave + shift) * np.pi / n
            term = 2 * np.sin(p) if naive else 9 / 4 * np.sin(p) - np.sin(3 * p) / 12
            expected -= term**2
        block = checks.plane_wave(lattice, waves)
        psi = checks.vectors(operator, block)
        for parity in PARITIES:
            twice = operator.dslash(operator.dslash(psi[parity], 1 - parity), parity)
            wrong = np.abs(twice - expected * psi[parity]).max()
            assert float(lattice.grid.allreduce(wrong, "max")) < 1e-13
            # For an eigenvector one iteration solves the system.
            found = solve(operator, psi[parity], parity, 0.3, Stop(1e-24, 9))
            assert found.iterations == 1
            answer = np.abs(found.x - psi[parity] / (4 * 0.3**2 - expected)).max()
            assert float(lattice.grid.allreduce(answer, "max")) < 1e-13

    def test_bytes_are_the_fewest(self, lattice: Lattice, comm: MPI.Intracomm) -> None:
        check_bytes(lattice, comm)

    @pytest.mark.parametrize("naive", [True], indirect=True)
    def test_mixed_up_parities(self, lattice: Lattice, naive: bool, comm: MPI.Intracomm) -> None:
        operator = operator_of(lattice, whole_links(), naive)
        even, odd = checks.vectors(operator, np.ascontiguousarray(whole_vectors()[lattice.owned]))
        assert "source" in failure(lambda: operator.dslash(even, EVEN), comm)
        assert "out" in failure(lambda: operator.normal(odd, ODD, 0.1, even), comm)
        assert "b " in failure(lambda: solve(operator, odd, EVEN, 0.1, Stop(1e-10, 9)), comm)


@pytest.mark.ranks(1, 2, 3, 4)
class TestConjugateGradient:
    @pytest.mark.parametrize(
        ("naive", "precision", "residual"),
        [
            (False, "double", 1e-14),
            pytest.param(True, "single", 1e-9, marks=pytest.mark.ranks(1, 2, 3)),
        ],
        indirect=["naive"],
    )
    @pytest.mark.usually(2, 4)
    def test_solution_and_the_iterations_of_one_rank(
        self, lattice: Lattice, naive: bool, precision: str, residual: float, comm: MPI.Intracomm
    ) -> None:
        whole, b = whole_links(), whole_vectors()

        def solved(where: Lattice) -> tuple[np.ndarray, list[Solution]]:
            operator = operator_of(where, whole, naive, precision)
            parts = checks.vectors(operator, np.ascontiguousarray(b[where.owned]))
            found = [solve(operator, parts[p], p, 0.6, Stop(residual, 500)) for p in PARITIES]
            return where.join(found[EVEN].x, found[ODD].x), found

        block, found = solved(lattice)
        for one in found:
            assert one.iterations == len(one.history) > 10
            assert one.history[-1] <= residual < one.history[-2]
            assert one.residual <= residual
        x = assembled(lattice, block)
        ok = True
        if x is not None:
            with Lattice(SHAPE, lattice.depth, MPI.COMM_SELF) as alone:
                x_alone, found_alone = solved(alone)
            left = whole_lattice.normal(x.astype(complex), whole, 0.6, naive=naive) - b
            ok = (
                [one.iterations for one in found] == [one.iterations for one in found_alone]
                and error(x, x_alone) < 10 * residual**0.5
                and np.linalg.norm(left)
                < (1.1 * residual**0.5 + TOLERANCE[precision]) * np.linalg.norm(b)
            )
        assert agree(ok, comm)

    @pytest.mark.parametrize("naive", [True], indirect=True)
    def test_what_ends_it(self, lattice: Lattice, naive: bool, comm: MPI.Intracomm) -> None:
        """Not enough iterations, a residual below the precision, numbers that are not finite on one rank."""

        def ended(
            links_: np.ndarray, precision: str, residual: float, most: int, value: Any
        ) -> str:
            operator = operator_of(lattice, links_, naive, precision)
            _, b = checks.vectors(operator, np.ascontiguousarray(whole_vectors()[lattice.owned]))
            if value is not None and comm.rank == comm.size - 1:
                b[0, 0, 0, 0] = value
            return failure(lambda: solve(operator, b, ODD, 0.6, Stop(residual, most)), comm)

        whole, broken = whole_links(), whole_links()
        broken[1, 2, 3, 4] = np.nan
        assert "after 7 iterations" in ended(whole, "double", 1e-18, 7, None)
        assert "restarts" in ended(whole, "single", 1e-17, 400, None)
        assert "--source" in ended(whole, "double", 1e-18, 7, np.nan)
        assert " is nan" in ended(broken, "double", 1e-18, 7, None)
        operator = operator_of(lattice, whole, naive)
        zero = solve(operator, operator.vector(ODD), ODD, 0.2, Stop(1e-18, 7))
        assert (zero.iterations, zero.residual, zero.x.any()) == (0, 0, False)


class TestSampleOfMilc:
    @pytest.fixture
    def data(self) -> Path:
        return milc_data()

    @MILC_SIZES
    @pytest.mark.usually(2, 4)
    def test_residual_of_its_answer_and_its_iterations(
        self, data: Path, comm: MPI.Intracomm
    ) -> None:
        with Lattice(SAMPLE, 3, comm) as lattice:
            fat, long = (
                scidac.read(str(data / name), lattice.grid, scidac.LINKS)
                for name in ("fat.l8", "long.l8")
            )
            operator = Staggered(
                lattice, links.tables(lattice, {1: fat, 3: long}, np.dtype(complex))
            )
            b, answer = (
                checks.vectors(operator, scidac.read(str(data / name), lattice.grid, scidac.VECTOR))
                for name in ("ksvector.src.sample.l8", "ksvector.ans.MdaggerMinv.sample.l8")
            )
            norm, dot = lattice.grid.norm, lattice.grid.dot
            assert dot(b[EVEN], b[EVEN]).real == pytest.approx(3.398941454223e6, rel=1e-12)
            assert dot(b[ODD], b[ODD]).real == pytest.approx(3.504609272255e6, rel=1e-12)
            once = operator.dslash(b[EVEN], ODD)
            assert dot(once, once).real == pytest.approx(2.295335425515e9, rel=1e-12)

            squares = []
            for parity in PARITIES:
                left = operator.vector(parity)
                operator.normal(answer[parity], parity, 0.1, left)
                left -= b[parity]
                squares.append(dot(left, left).real)
                found = solve(operator, b[parity], parity, 0.1, Stop(1e-18, 300))
                assert (found.iterations, found.applications) == (60, 62)
                assert found.history[:3] == pytest.approx(HISTORIES[parity], rel=1e-9)
                assert 7e-19 < found.residual < 9e-19
                left[...] = found.x - answer[parity]
                assert norm(left) / norm(answer[parity]) < 1e-7
            size = sum(dot(b[parity], b[parity]).real for parity in PARITIES)
            assert (sum(squares) / size) ** 0.5 == pytest.approx(6.3e-8, rel=0.01)

    def test_long_links_are_products_of_thin_ones(self, data: Path, comm: MPI.Intracomm) -> None:
        """MILC's own coefficient, phases and boundary sign, on any number of ranks."""
        with Lattice(SAMPLE, 1, comm) as lattice:
            expected = scidac.read(str(data / "long.l8"), lattice.grid, scidac.LINKS)
        with Lattice(SAMPLE, 1, MPI.COMM_SELF) as alone:
            whole = gauge.gauge_field(alone, str(data / "lat.sample.l8"), 0)
        product = np.empty_like(whole)
        for mu in range(4):
            u = whole[..., mu, :, :]
            ahead = (whole_lattice.there(u, mu, distance) for distance in (1, 2))
            product[..., mu, :, :] = u @ next(ahead) @ next(ahead)
        mine = links.phased(lattice, np.ascontiguousarray(product[lattice.owned]), 3)
        assert agree(np.abs(-0.1653413 * mine - expected).max() < 1e-7, comm)

    @MILC_SIZES
    @pytest.mark.usually(2, 4)
    def test_app(self, data: Path, folder: Path, comm: MPI.Intracomm) -> None:
        words = ["--residual", "1e-18", "--solution", str(folder / "x")]
        for option, name in (
            ("--gauge", "lat.sample.l8"),
            ("--fat", "fat.l8"),
            ("--long", "long.l8"),
            ("--source", "ksvector.src.sample.l8"),
        ):
            words += [option, str(data / name)]
        found = benchmark.run_benchmark(settings(*words), comm, lambda *_: None)
        ok = found is None or (
            found["verified"] is True
            and found["even"]["milc_iterations"] + found["odd"]["milc_iterations"] == 124
            and found["plaquette_space_space"] == pytest.approx(PLAQUETTES[0], abs=1e-13)
            and found["plaquette_space_time"] == pytest.approx(PLAQUETTES[1], abs=1e-13)
        )
        assert agree(ok and (found is None) == (comm.rank != 0), comm)
        with halox.Grid(SAMPLE, comm=comm, device="cpu") as grid:
            x = scidac.read(str(folder / "x"), grid, scidac.VECTOR)
            name = str(data / "ksvector.ans.MdaggerMinv.sample.l8")
            answer = scidac.read(name, grid, scidac.VECTOR)
        assert agree(np.abs(x - answer).max() < 1e-5 * np.abs(answer).max(), comm)


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated sites": lambda b: b[:-1000],
    "another format": lambda b: b"P6 8 8\n" + b,
    "another lattice": lambda b: b.replace(b"6 6 6 12 ", b"6 6 12 6 "),
    "another site type": lambda b: b,
    "unknown precision": lambda b: b.replace(b"<precision>D", b"<precision>H"),
    "a wrong bit": lambda b: b[:200000] + bytes([b[200000] ^ 1]) + b[200001:],
}


@pytest.mark.ranks(1, 2, 3, 4)
class TestFiles:
    @pytest.mark.parametrize("dtype", ["c8", "c16"])
    @pytest.mark.parametrize("site", [scidac.LINKS, scidac.VECTOR], ids=lambda site: site.name)
    def test_written_by_any_number_of_ranks(
        self, site: scidac.SiteType, dtype: str, folder: Path, comm: MPI.Intracomm
    ) -> None:
        whole = whole_links() if site is scidac.LINKS else whole_vectors()
        whole = whole.astype(dtype)
        with Lattice(SHAPE, 1, comm) as lattice:
            scidac.write(
                str(folder / "all"), whole[lattice.owned], lattice.grid, site, "random numbers"
            )
            found = scidac.read(str(folder / "all"), lattice.grid, site)
            assert agree(np.array_equal(found, whole[lattice.owned]), comm)
        if comm.rank == 0:
            with halox.Grid(SHAPE, comm=MPI.COMM_SELF, device="cpu") as grid:
                scidac.write(str(folder / "one"), whole, grid, site, "random numbers")
        comm.Barrier()
        written = (folder / "all").read_bytes()
        assert written == (folder / "one").read_bytes()
        assert np.ascontiguousarray(whole, np.dtype(dtype).newbyteorder(">")).tobytes() in written
        assert sorted(path.name for path in folder.iterdir()) == ["all", "one"]

    @pytest.fixture
    def written(self, folder: Path, comm: MPI.Intracomm) -> Path:
        if comm.rank == 0:
            with halox.Grid(SHAPE, comm=MPI.COMM_SELF, device="cpu") as grid:
                scidac.write(str(folder / "links"), whole_links(), grid, scidac.LINKS, "links")
                vectors = whole_vectors().astype("c8")
                scidac.write(str(folder / "vectors"), vectors, grid, scidac.VECTOR, "vectors")
        comm.Barrier()
        return folder

    @pytest.mark.parametrize("change", CHANGES)
    def test_files_that_are_refused(self, change: str, written: Path, comm: MPI.Intracomm) -> None:
        name = "vectors" if change == "another site type" else "links"
        bad = written / "bad"
        if comm.rank == 0:
            bad.write_bytes(CHANGES[change]((written / name).read_bytes()))
        comm.Barrier()
        with Lattice(SHAPE, 1, comm) as lattice:
            said = failure(lambda: gauge.gauge_field(lattice, str(bad), 0), comm)
        assert said.startswith(f"{bad} ")

    def test_missing_files_and_folders(self, folder: Path, comm: MPI.Intracomm) -> None:
        missing = str(folder / "none" / "file")
        with Lattice(SHAPE, 1, comm) as lattice:
            grid, block = lattice.grid, whole_vectors()[lattice.owned]
            assert missing in failure(lambda: scidac.read(missing, grid, scidac.VECTOR), comm)
            write = partial(scidac.write, missing, block, grid, scidac.VECTOR, "")
            assert missing in failure(write, comm)

    def test_links_that_are_not_unitary(self, folder: Path, comm: MPI.Intracomm) -> None:
        block = whole_links()
        block[3, 2, 1, 0, 2, 1] *= 1.25
        if comm.rank == 0:
            with halox.Grid(SHAPE, comm=MPI.COMM_SELF, device="cpu") as grid:
                scidac.write(str(folder / "bad"), block, grid, scidac.LINKS, "links")
        comm.Barrier()
        with Lattice(SHAPE, 1, comm) as lattice, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            gauge.gauge_field(lattice, str(folder / "bad"), 0)
        assert agree(
            ["SU(3)" in str(one.message) for one in said] == [True] * (comm.rank == 0), comm
        )


@pytest.mark.ranks(1, 2, 3, 4)
class TestApp:
    @pytest.mark.parametrize(
        ("precision", "naive"),
        [("mixed", False), *full(("single", True), ("double", False), ("mixed", True))],
    )
    def test_figures(self, precision: str, naive: bool, comm: MPI.Intracomm) -> None:
        words = ["--lattice", "6", "6", "6", "12", "--precision", precision, "--gauge", "unit"]
        words += ["--naive"] * naive
        found = benchmark.run_benchmark(settings(*words), comm, lambda *_: None)
        assert (found is not None) == (comm.rank == 0)
        ok = found is None or (
            found["verified"] is True
            and found["lattice"] == [6, 6, 6, 12]
            and found["ranks"] == np.prod(found["process_grid"]) == comm.size
            and found["operator"] == ("naive" if naive else "improved")
            and set(found["checks"]) == {"anti_hermiticity", "plaquettes", "unit_gauge_eigenvalue"}
            and [row["part"] for row in found["rows"]]
            == ["exchange", "dslash", "linear algebra", "sums"]
            and sum(row["share"] for row in found["rows"]) == pytest.approx(1)
        )
        assert agree(ok, comm)
