"""The halo benchmark: every path, halox's own choice, and hand-written exchanges, in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from halox.grid import Grid
from halox.runtime.world import load_mpi
from halox_bench.common.rows import Row
from halox_bench.exchange.baselines import ByHand, MpiNeighbour, MpiTypes
from halox_bench.exchange.cases import ExchangeCase, Neighbourhood
from halox_bench.exchange.oracle import Oracle
from halox_bench.ranks.bench import RanksBench
from halox_bench.ranks.methods import Baseline, Method, Prepared, paths_taken

MOST_HOST_BYTES = 1 << 30
"""Larger fields on one rank are left out on CPUs."""

_FREE_SHARE = 0.4
_CHECKS = 3


class ExchangeBench(RanksBench):
    """Halo exchanges of the ranks of a communicator."""

    def measure(self, case: ExchangeCase) -> list[Row]:
        if not self._fits(case):
            return self.left_out(case, f"{case.field_bytes:,} bytes a rank are too many")
        with PreparedExchange(self, case) as prepared:
            return prepared.rows()

    def heading(self) -> str:
        return f"{self.comm.size} ranks, {self.options.device} arrays; microseconds an exchange, the slowest rank's"

    def _fits(self, case: ExchangeCase) -> bool:
        most = float(MOST_HOST_BYTES)
        if self.stage.device is not None:
            most = _FREE_SHARE * self.stage.xp.cuda.runtime.memGetInfo()[0]
            most /= self.comm.size if self.shared_gpu else 1
        return bool(self.comm.allreduce(case.field_bytes <= most, load_mpi().LAND))


class PreparedExchange(Prepared):
    """A case on the ranks: its grid and fields, and every method with a right result."""

    case: ExchangeCase

    def enter(self, stack: ExitStack) -> None:
        """Make the grid, its fields, and the oracle of this rank's place in the process grid."""
        case, comm = self.case, self.comm
        device: Any = self.bench.options.device
        proc_shape = case.proc_shape(comm.size)
        self._grid = stack.enter_context(
            Grid(
                tuple(n * p for n, p in zip(case.shape, proc_shape, strict=True)),
                halo=case.halo,
                periodic=case.periodic,
                proc_shape=proc_shape,
                comm=comm,
                corners=case.corners,
                device=device,
            )
        )
        with self.stage.current():
            self.own_arrays = [
                self._grid.zeros(case.dtype, components_after=case.components)
                for _ in range(case.fields)
            ]
            self.arrays = self.arrays_of_users()
            coords = dict(enumerate(comm.allgather(self._grid.coords)))
            self._near = Neighbourhood(case, coords, comm.rank)
            self._oracle = Oracle(self._near, self.stage.xp)
        self.details = {"proc_shape": proc_shape, "bytes_each_way": self._near.bytes_sent}

    def own(self, kind: str, name: str, chosen: str | None) -> Method:
        """Plan the exchange by a path."""
        path: Any = {} if chosen is None else {"path": chosen}
        plan = self._grid.plan(*self.own_arrays, corners=self.case.corners, **path)
        taken = paths_taken(plan.explain().rows, without=self.comm.rank)
        return Method(kind, name, plan, plan.close, True, self.own_arrays, {"path": taken})

    def exchange(self) -> None:
        """Exchange by `Grid.exchange`, which finds its plan."""
        self._grid.exchange(*self.own_arrays, corners=self.case.corners)

    def baselines(self) -> Mapping[str, Callable[[], Baseline]]:
        """Return packed messages and MPI's types for NumPy arrays; kernels around NCCL and MPI for CuPy arrays."""
        device = self.stage.device
        what = self.comm, self._near, self.arrays
        if device is None:
            return {one.name: partial(one, *what) for one in (ByHand, MpiTypes, MpiNeighbour)}
        from halox_bench.exchange import baselines_gpu as gpu

        def aware() -> Baseline:
            self.bench.need_gpu_aware()
            return gpu.ByMpi(*what, device, host=False)

        return {
            gpu.NCCL: lambda: gpu.ByNccl(self.bench.nccl(), *what, device),
            gpu.ZERO_COPY: lambda: gpu.ByMpi(*what, device, host=True),
            gpu.GPU_AWARE: aware,
        }

    def check(self, method: Method, call: Callable[[], Any]) -> None:
        for step in range(1, _CHECKS + 1):
            self._oracle.fill(method.arrays, step)
            call()
            wrong = self._oracle.wrong(method.arrays, step)
            self.expect(wrong, f"values, in exchange {step} of {_CHECKS}")
