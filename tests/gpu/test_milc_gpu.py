"""The staggered fermions mini-app on a GPU: MILC's sample, closed forms, comparison with NumPy, graphs, the command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from apps.milc import checks, links, random_fields, scidac
from apps.milc.cg import ConjugateGradient, Stop
from apps.milc.lattice import EVEN, ODD, PARITIES, Lattice
from apps.milc.operator import Staggered
from tests import support
from tests.mpi import whole_lattice
from tests.mpi.test_milc import HISTORIES, SAMPLE, applied, error, operator_of
from tests.support import milc_data, require

pytestmark = pytest.mark.gpu
require("gpu")

import cupy  # noqa: E402

SHAPE = (6, 10, 8, 36)
WHOLE = tuple(slice(0, n) for n in SHAPE)
TOLERANCE = {"single": 3e-6, "double": 3e-15}


@pytest.fixture(params=[3, 1], ids=["improved", "naive"])
def lattice(request: pytest.FixtureRequest) -> Iterator[Lattice]:
    with (
        cupy.cuda.Stream(non_blocking=True),
        Lattice(SHAPE, request.param, MPI.COMM_SELF, "gpu") as found,
    ):
        yield found


def thin_links() -> np.ndarray:
    return random_fields.random_matrices(SHAPE, WHOLE, 4, 3, random_fields.LINKS)


def source() -> np.ndarray:
    return random_fields.random_vectors(SHAPE, WHOLE, 3, random_fields.SOURCE)


class TestOperator:
    @pytest.mark.parametrize("precision", ["double", "single"])
    def test_definition(self, lattice: Lattice, precision: str) -> None:
        naive = lattice.depth == 1
        found = applied(operator_of(lattice, thin_links(), naive, precision), source())
        expected = whole_lattice.dslash(source(), thin_links(), naive=naive)
        assert error(found, expected) < TOLERANCE[precision]


class TestConjugateGradient:
    @pytest.mark.parametrize("graph", [False, True])
    def test_the_history_of_numpy(self, lattice: Lattice, graph: bool) -> None:
        naive, stop = lattice.depth == 1, Stop(1e-16, 500)
        with Lattice(SHAPE, lattice.depth, MPI.COMM_SELF) as host:
            numpys = operator_of(host, thin_links(), naive)
            b = checks.vectors(numpys, source())[ODD]
            expected = ConjugateGradient(numpys, ODD, 0.3, stop).solve(b)
        operator = operator_of(lattice, thin_links(), naive)
        gradient = ConjugateGradient(operator, ODD, 0.3, stop)
        if graph:
            gradient.capture(cupy.cuda.get_current_stream())
        for _ in range(2):
            found = gradient.solve(checks.vectors(operator, source())[ODD])
            assert found.iterations == expected.iterations
            assert found.applications == expected.applications
            np.testing.assert_allclose(found.history[:10], expected.history[:10], rtol=1e-12)
            assert error(lattice.values(found.x), expected.x) < 1e-8

    def test_errors_are_those_of_the_host(self, lattice: Lattice) -> None:
        operator = operator_of(lattice, thin_links(), lattice.depth == 1)
        b = checks.vectors(operator, source())[EVEN]
        gradient = ConjugateGradient(operator, EVEN, 0.3, Stop(1e-16, 11))
        gradient.capture(cupy.cuda.get_current_stream())
        with pytest.raises(halox.HaloxError, match="after 11 iterations"):
            gradient.solve(b)
        for table in operator.tables:
            table.matrices[...] = np.nan
        with pytest.raises(halox.HaloxError, match="after 0 iterations"):
            gradient.solve(b)

    def test_sample_of_milc(self) -> None:
        data = milc_data()
        with (
            cupy.cuda.Stream(non_blocking=True) as stream,
            Lattice(SAMPLE, 3, MPI.COMM_SELF, "gpu") as lattice,
        ):
            fat, long = (
                scidac.read(str(data / name), lattice.grid, scidac.LINKS)
                for name in ("fat.l8", "long.l8")
            )
            tables = links.tables(lattice, {1: fat, 3: long}, np.dtype(complex))
            operator = Staggered(lattice, tables)
            b, answer = (
                checks.vectors(operator, scidac.read(str(data / name), lattice.grid, scidac.VECTOR))
                for name in ("ksvector.src.sample.l8", "ksvector.ans.MdaggerMinv.sample.l8")
            )
            for parity in PARITIES:
                gradient = ConjugateGradient(operator, parity, 0.1, Stop(1e-18, 500))
                gradient.capture(stream)
                found = gradient.solve(b[parity])
                assert (found.iterations, found.applications) == (60, 62)
                assert found.history[:3] == pytest.approx(HISTORIES[parity], rel=1e-9)
                far = float(cupy.linalg.norm((found.x - answer[parity]).ravel()))
                assert far < 1e-7 * float(cupy.linalg.norm(answer[parity].ravel()))


def verified(*words: str) -> dict[str, Any]:
    figures = support.verified("milc", "--device", "gpu", *words)
    assert figures["device"] == "gpu"
    return figures


class TestCommand:
    @pytest.mark.parametrize(
        ("precision", "words"),
        [
            ("double", ()),
            ("single", ("--graph",)),
            ("mixed", ("--graph",)),
            ("double", ("--naive", "--graph")),
            ("mixed", ("-n", "2")),
        ],
    )
    def test_runs(self, precision: str, words: tuple[str, ...]) -> None:
        figures = verified(
            "--lattice", "8", "12", "8", "16", "--mass", "0.2", "--precision", precision, *words
        )
        assert figures["graph"] is ("--graph" in words) and figures["precision"] == precision
        limit = 1e-10 if precision == "single" else 1e-18
        assert figures["even"]["residual"] <= limit and figures["odd"]["residual"] <= limit
