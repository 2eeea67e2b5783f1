"""A run: builds links and source, checks the operator, and solves on even and on odd sites with times by part."""

from __future__ import annotations

import time
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ..common import Progress, Timer
from ..device import run_stream
from ..nas_benchmark import means
from . import checks, random_fields, scidac
from .cg import ConjugateGradient, Solution, Stop
from .gauge import Plaquettes, gauge_field, plaquettes
from .lattice import NAMES, PARITIES, Lattice
from .links import of_thin, tables
from .memory import check_memory
from .operator import PARTS, Staggered
from .options import Settings

DSLASH_FLOPS = {True: 570, False: 1146}
"""Operations of D per site of the result, as MILC counts them; the key is whether the operator is naive."""

CG_FLOPS = {True: 606, False: 1187}
"""Operations of an iteration on one parity per site of the lattice, as MILC counts them."""


class Laps:
    """Times of the parts of a sequence of operations."""

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        self._names: list[str] = []
        self._marks = [timer.mark()]

    def __call__(self, part: str) -> None:
        """End a part, which started at the end of the previous part."""
        self._names.append(part)
        self._marks.append(self._timer.mark())

    def seconds(self) -> dict[str, float]:
        """Return the seconds of all parts by name."""
        lengths = self._timer.seconds(pairwise(self._marks))
        totals = dict.fromkeys(PARTS, 0.0)
        for name, length in zip(self._names, lengths, strict=True):
            totals[name] += length
        return totals


def run_benchmark(settings: Settings, comm: Any, progress: Progress) -> dict[str, Any] | None:
    """Run the benchmark; returns the figures on rank 0 and None elsewhere."""
    depth = 1 if settings.naive else 3
    with Lattice(settings.shape, depth, comm, settings.device) as lattice, ExitStack() as stack:
        stream = run_stream(lattice.grid, stack, graph=settings.graph)
        memory = check_memory(lattice, settings)
        progress("reading or making links", 0, 1)
        operator, inner, found = make_operators(settings, lattice)
        sources = checks.vectors(operator, _source(settings, lattice))
        progress("checks", 0, 1)
        errors, passed = _checks(settings, operator, found)

        runs = []
        for parity in PARITIES:
            progress(f"solving on {NAMES[parity]} sites", parity, len(PARITIES))
            stop = Stop(settings.residual, settings.iterations)
            solver = ConjugateGradient(operator, parity, settings.mass, stop, inner)
            runs.append(_timed(solver, sources[parity], lattice, stream, graph=settings.graph))
        solutions, times = [one.solution for one in runs], [one.parts for one in runs]
        if settings.solution is not None:
            block = lattice.join(*(lattice.values(found.x) for found in solutions))
            title = f"solution of (M^dagger M) x = b, mass {settings.mass:g}"
            scidac.write(settings.solution, block, lattice.grid, scidac.VECTOR, title)
        parts = {part: sum(time[part] for time in times) for part in PARTS}
        parts = means(comm, parts)
        if comm.rank != 0:
            return None
        return {
            "app": "milc",
            "lattice": list(settings.shape[::-1]),
            "ranks": comm.size,
            "process_grid": list(lattice.grid.proc_shape),
            "device": lattice.grid.device,
            "graph": settings.graph,
            "operator": "naive" if settings.naive else "improved",
            "precision": settings.precision,
            "memory_gib": memory / 2**30,
            "mass": settings.mass,
            **({} if found is None else _plaquette_figures(found)),
            **{NAMES[parity]: _solution_figures(solutions[parity]) for parity in PARITIES},
            **_rates(settings, lattice.volume, solutions, sum(one.seconds for one in runs), parts),
            "checks": errors,
            "verified": passed,
        }


class _Run(NamedTuple):
    """Solution for one parity, seconds of the slowest rank, and seconds of the parts on this rank."""

    solution: Solution
    seconds: float
    parts: dict[str, float]


def _timed(
    solver: ConjugateGradient, b: Any, lattice: Lattice, stream: Any, *, graph: bool
) -> _Run:
    """Solve and time. A GPU solves twice: first to time the parts, then, perhaps as a graph, to time the whole."""
    timer, comm = Timer(lattice.grid.xp), lattice.grid.comm
    comm.Barrier()
    begin, laps = time.perf_counter(), Laps(timer)
    found = solver.solve(b, laps)
    if stream is not None:
        if graph:
            solver.capture(stream)
        comm.Barrier()
        stream.synchronize()
        begin = time.perf_counter()
        found = solver.solve(b)
        stream.synchronize()
    seconds = max(comm.allgather(time.perf_counter() - begin))
    return _Run(found, seconds, laps.seconds())


def make_operators(
    settings: Settings, lattice: Lattice
) -> tuple[Staggered, Staggered | None, Plaquettes | None]:
    """Return the operator, the single-precision operator or None, and the plaquettes or None; collective.

    Mixed precision needs the second operator, and only a gauge field has plaquettes.
    """
    found, links = None, {}
    if settings.gauge is not None:
        gauge = gauge_field(lattice, settings.gauge, settings.seed)
        found = plaquettes(lattice, gauge)
        if settings.fat is None:
            links = of_thin(lattice, gauge, naive=settings.naive)
    if settings.fat is not None and settings.long is not None:
        for distance, path in ((1, settings.fat), (3, settings.long)):
            links[distance] = scidac.read(path, lattice.grid, scidac.LINKS)
    even, odd = tables(lattice, links, settings.dtype)
    inner = None
    if settings.precision == "mixed":
        single = np.dtype("c8")
        inner = Staggered(lattice, (even.astype(single), odd.astype(single)))
    return Staggered(lattice, (even, odd)), inner, found


def _source(settings: Settings, lattice: Lattice) -> np.ndarray:
    if settings.source is not None:
        return scidac.read(settings.source, lattice.grid, scidac.VECTOR)
    return random_fields.random_vectors(
        lattice.shape, lattice.owned, settings.seed, random_fields.SOURCE
    )


def _checks(
    settings: Settings, operator: Staggered, found: Plaquettes | None
) -> tuple[dict[str, float], bool]:
    """Return the errors of all checks that apply, and whether all are small enough; also warms up. Collective."""
    tolerance = checks.TOLERANCES[settings.precision]
    errors = {"anti_hermiticity": checks.anti_hermiticity(operator, settings.seed)}
    limits = {"anti_hermiticity": tolerance}
    if settings.gauge == "unit" and found is not None:
        errors["plaquettes"] = max(abs(value - 3) for value in found)
        limits["plaquettes"] = checks.PLAQUETTE
        if settings.fat is None:
            distances = [1] if settings.naive else [1, 3]
            errors["unit_gauge_eigenvalue"] = checks.plane_wave_error(operator, distances)
            limits["unit_gauge_eigenvalue"] = tolerance
    return errors, all(errors[name] <= limit for name, limit in limits.items())


def _rates(
    settings: Settings,
    volume: int,
    solutions: list[Solution],
    seconds: float,
    times: dict[str, float],
) -> dict[str, Any]:
    applications = sum(found.applications for found in solutions)
    flops = applications * volume
    multiplying = times["exchange"] + times["dslash"]
    total = sum(times[part] for part in PARTS)
    return {
        "time_s": seconds,
        "cg_gflops": CG_FLOPS[settings.naive] * flops / seconds / 1e9,
        "dslash_gflops": DSLASH_FLOPS[settings.naive] * flops / multiplying / 1e9,
        "rows": [
            {
                "part": part,
                "ms_an_iteration": times[part] / applications * 1e3,
                "share": times[part] / total,
            }
            for part in PARTS
        ],
        "reading_the_table": ["means over ranks", "exchange, sums: with the wait for slower ranks"],
    }


def _solution_figures(found: Solution) -> dict[str, Any]:
    return {
        "iterations": found.iterations,
        "milc_iterations": found.applications,
        "true_residuals": found.residuals,
        "residual": found.residual,
    }


def _plaquette_figures(found: Plaquettes) -> dict[str, float]:
    return {f"plaquette_{name}": value for name, value in found._asdict().items()}
