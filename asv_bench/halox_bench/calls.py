"""``halox bench calls``: host time of cached calls on a GPU, beside the launch of an empty kernel."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import halox
from halox import datatypes
from halox.runtime.world import load_mpi
from halox_bench.bench import Bench, WrongResult, rows_of_times
from halox_bench.clock import Call
from halox_bench.kinds import Kind, Option, words_of
from halox_bench.rows import Row

BARE_LAUNCH = "launch of an empty CuPy RawKernel with five arguments"
EXCHANGE, PACK = "exchange", "pack"

_NOTHING = 'extern "C" __global__ void none(long a, long b, int c, int d, int e) {}'
_ROUNDS, _CALLS = 30, 20


class CallCase(NamedTuple):
    """A cached call: of an exchange of one rank with 26 periodic neighbours, or of `halox.pack` of 64 KiB."""

    name: str

    @property
    def details(self) -> dict[str, Any]:
        return {}


def bare_launch(cp: Any) -> Call:
    """Return a launch of an empty kernel on CuPy's current stream: no launching call is faster."""
    kernel = cp.RawKernel(_NOTHING, "none")
    arguments = tuple(kind(0) for kind in (cp.int64, cp.int64, cp.int32, cp.int32, cp.int32))
    return lambda: kernel((1,), (1,), arguments)


def host_us(bench: Bench, call: Callable[[], Any]) -> float:
    """Return the median host time of a call that returns before the GPU is done."""
    times = []
    for _ in range(_ROUNDS):
        bench.stage.synchronize()
        begin = time.perf_counter()
        for _ in range(_CALLS):
            call()
        times.append((time.perf_counter() - begin) / _CALLS)
    bench.stage.synchronize()
    return median(times) * 1e6


def measure(bench: Bench, args: argparse.Namespace, case: CallCase) -> list[Row]:
    """Measure one call, on each rank by itself; the slowest rank's time."""
    xp = bench.stage.xp
    with (
        bench.stage.current(),
        halox.Grid(
            (32, 32, 32), periodic=True, comm=load_mpi().COMM_SELF, device=bench.device
        ) as grid,
    ):
        u = grid.zeros("f8")
        grid.interior(u)[...] = 1
        vector = datatypes.vector(512, 16, 32, "f8")  # 64 KiB in blocks of 128 bytes
        array, out = xp.arange(32.0 * 512), xp.empty(vector.size, "u1")
        calls: dict[str, Call] = {
            EXCHANGE: lambda: grid.exchange(u),
            PACK: lambda: halox.pack(array, vector, 1, out),
        }
        calls[case.name]()
        bench.stage.synchronize()
        packed = xp.asarray(array).reshape(512, 32)[:, :16].reshape(-1)
        if not ((u == 1).all() if case.name == EXCHANGE else (out.view("f8") == packed).all()):
            raise WrongResult(f"{case.name}: wrong result")
        timed = {case.name: host_us(bench, calls[case.name])}
        if bench.on_gpu:
            timed[BARE_LAUNCH] = host_us(bench, bare_launch(xp))
        timed = {name: bench.comm.allreduce(us, load_mpi().MAX) for name, us in timed.items()}
    return rows_of_times(case, timed, case.name)


CALLS = Kind(
    "calls",
    "the host's time of cached calls, beside the launch of an empty kernel",
    lambda args: [CallCase(name) for name in args.of],
    measure,
    (
        Option(
            "--of", f"{EXCHANGE}, {PACK}; default: both", words_of(EXCHANGE, PACK), (EXCHANGE, PACK)
        ),
    ),
    budget_s=20.0,
)
