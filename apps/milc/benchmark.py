"""A run: links and source, the conjugate gradient on even and on odd sites with its time by part, and checks."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import numpy as np

from ..common import Progress, Timer
from . import checks, random_fields, scidac
from .cg import Solution, Stop, solve
from .gauge import Plaquettes, gauge_field, plaquettes
from .lattice import NAMES, PARITIES, Lattice
from .links import of_thin, tables
from .operator import PARTS, Staggered
from .options import Settings

DSLASH_FLOPS = {True: 570, False: 1146}
"""Operations of D per site of the result, naive or not, as MILC counts them."""

CG_FLOPS = {True: 606, False: 1187}
"""Operations of an iteration per site of the lattice, for one parity, likewise."""


class Laps:
    """Times of the parts of a sequence of operations."""

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        self._names: list[str] = []
        self._marks = [timer.mark()]

    def __call__(self, part: str) -> None:
        """End a part; it began at the end of the one before."""
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
    """Run with these settings; figures on rank 0, None elsewhere."""
    with Lattice(settings.shape, 1 if settings.naive else 3, comm) as lattice:
        progress("reading or making links", 0, 1)
        operator, found = make_operator(settings, lattice)
        sources = checks.vectors(operator, _source(settings, lattice))
        progress("checks", 0, 1)
        errors, passed = _checks(settings, operator, found)

        stop = Stop(settings.residual, settings.iterations)
        solutions, seconds = [], []
        timer = Timer(lattice.grid.xp)
        times = dict.fromkeys(PARTS, 0.0)
        for parity in PARITIES:
            progress(f"solving on {NAMES[parity]} sites", parity, len(PARITIES))
            comm.Barrier()
            begin, laps = time.perf_counter(), Laps(timer)
            solutions.append(solve(operator, sources[parity], parity, settings.mass, stop, laps))
            seconds.append(max(comm.allgather(time.perf_counter() - begin)))
            for part, taken in laps.seconds().items():
                times[part] += taken
        if settings.solution is not None:
            block = lattice.join(*(found.x for found in solutions))
            title = f"solution of (M^dagger M) x = b, mass {settings.mass:g}"
            scidac.write(settings.solution, block, lattice.grid, scidac.VECTOR, title)
        times = _means(comm.allgather(times))
        if comm.rank != 0:
            return None
        return {
            "app": "milc",
            "lattice": list(settings.shape[::-1]),
            "ranks": comm.size,
            "process_grid": list(lattice.grid.proc_shape),
            "device": lattice.grid.device,
            "operator": "naive" if settings.naive else "improved",
            "precision": settings.precision,
            "mass": settings.mass,
            **({} if found is None else _plaquette_figures(found)),
            **{NAMES[parity]: _solution_figures(solutions[parity]) for parity in PARITIES},
            **_rates(settings, lattice.volume, solutions, sum(seconds), times),
            "checks": errors,
            "verified": passed,
        }


def make_operator(settings: Settings, lattice: Lattice) -> tuple[Staggered, Plaquettes | None]:
    """Return the operator, and the plaquettes of the gauge field if there is one; collective."""
    found, links = None, {}
    if settings.gauge is not None:
        gauge = gauge_field(lattice, settings.gauge, settings.seed)
        found = plaquettes(lattice, gauge)
        if settings.fat is None:
            links = of_thin(lattice, gauge, naive=settings.naive)
    if settings.fat is not None and settings.long is not None:
        for distance, path in ((1, settings.fat), (3, settings.long)):
            links[distance] = scidac.read(path, lattice.grid, scidac.LINKS)
    return Staggered(lattice, tables(lattice, links, settings.dtype)), found


def _source(settings: Settings, lattice: Lattice) -> np.ndarray:
    if settings.source is not None:
        return scidac.read(settings.source, lattice.grid, scidac.VECTOR)
    return random_fields.random_vectors(
        lattice.shape, lattice.owned, settings.seed, random_fields.SOURCE
    )


def _checks(
    settings: Settings, operator: Staggered, found: Plaquettes | None
) -> tuple[dict[str, float], bool]:
    """Return the errors of all checks that the run allows, and whether they are small; also warms up. Collective."""
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
        "residual": found.residual,
    }


def _plaquette_figures(found: Plaquettes) -> dict[str, float]:
    return {f"plaquette_{name}": value for name, value in found._asdict().items()}


def _means(everyone: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(times[name] for times in everyone) / len(everyone) for name in everyone[0]}
