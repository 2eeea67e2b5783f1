"""Exchanges in CUDA graphs: captured and replayed on paths that need no host; other paths raise during the capture."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from halox.errors import StateError
from tests.gpu.ranks.paths import BY_HOST, CAPTURED, COPIES, along
from tests.mpi.conftest import agree
from tests.mpi.ways import Way
from tests.support import require

require("gpu")

import cupy  # noqa: E402

from tests.gpu.ranks.stepping import Stepper  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2, 4)]

REPLAYS = 1000


@pytest.mark.parametrize("form", ["alone", "with kernels", "start and finish"])
@along(CAPTURED)
def test_captured(way: Way, form: str, comm: MPI.Intracomm) -> None:
    """Every replay has new values; the plan is also called without the graph before, between and after replays."""
    with way.box(comm) as grid:
        stepper, other = Stepper(grid), cupy.zeros(1000)
        plan = grid.plan(stepper.u)
        assert way.check_taken(plan, comm)
        steps = 0

        def normal(count: int) -> int:
            for _ in range(count):
                stepper.advance()
                plan()
                stepper.check()
            return count

        other += 0  # compiled before the capture
        cupy.cuda.runtime.deviceSynchronize()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            steps += normal(3)
            stepper.advance()
            plan.start()
            plan.finish()
            stepper.check()
            steps += 1
            stream.begin_capture()
            if form == "alone":
                plan()
            else:
                stepper.advance()
                if form == "with kernels":
                    plan()
                else:
                    plan.start()
                    other += 1
                    plan.finish()
                stepper.check()
            graph = stream.end_capture()

            def replay(count: int) -> int:
                for _ in range(count):
                    if form == "alone":
                        stepper.advance()
                    graph.launch(stream)
                    if form == "alone":
                        stepper.check()
                return count

            steps += normal(2) + replay(REPLAYS) + normal(3) + replay(10) + normal(1)
            stream.synchronize()
            assert agree(stepper.found() == (steps, 0), comm), (stepper.found(), steps)
            assert agree(stepper.is_at(steps) and stepper.broken(), comm)
        if form == "start and finish":
            assert int(other[0]) == REPLAYS + 10


@along(CAPTURED)
def test_two_plans_in_one_graph(way: Way, comm: MPI.Intracomm) -> None:
    """One graph runs the plans in sequence, and then both at the same time."""
    with way.box(comm) as grid:
        a, b = Stepper(grid), Stepper(grid)
        first, second = grid.plan(a.u), grid.plan(b.u)
        cupy.cuda.runtime.deviceSynchronize()  # another stream fills the fields
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            for stepper in (a, b):
                stepper.advance()
            first()
            second()
            for stepper in (a, b):
                stepper.check()
                stepper.advance()
            first.start()
            second.start()
            second.finish()
            first.finish()
            for stepper in (a, b):
                stepper.check()
            graph = stream.end_capture()
            for _ in range(300):
                graph.launch(stream)
            stream.synchronize()
        assert agree(a.found() == b.found() == (600, 0), comm), (a.found(), b.found())


@pytest.mark.parametrize("call", ["plan", "start"])
@along([*BY_HOST, *COPIES])
def test_capture_is_refused(way: Way, call: str, comm: MPI.Intracomm) -> None:
    """The error leaves the capture intact: the graph can be ended and launched, and the stream used."""
    with way.box(comm) as grid:
        stepper, counter = Stepper(grid), cupy.zeros(1)
        plan = grid.plan(stepper.u)
        counter += 0
        cupy.cuda.runtime.deviceSynchronize()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stepper.advance()
            plan()
            stepper.check()
            stream.begin_capture()
            counter += 1
            with pytest.raises(StateError):
                plan() if call == "plan" else plan.start()
            counter += 1
            graph = stream.end_capture()
            for _ in range(3):
                graph.launch(stream)
            stepper.advance()
            again = grid.plan(stepper.u)
            again()
            stepper.check()
            stream.synchronize()
        assert agree(stepper.found() == (2, 0) and float(counter[0]) == 6, comm), stepper.found()
