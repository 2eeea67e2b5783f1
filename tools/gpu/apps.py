"""The mini-apps that the GPU check runs, and their figures."""

from __future__ import annotations

import json
import time
from typing import Any

from tools.gpu.running import run

QUIET_S = 120.0
MG_CLASS, FT_CLASSES = "C", ("B", "C")
LARGE_MG_CLASS, LARGE_MG_RANKS = "D", 8
MILC_LATTICE = ("--lattice", "16", "16", "16", "16")
LARGE_MILC = (32, 32, 32, 32)

COPY_GB_PER_S = 4180.0
"""Speed of a large copy on an H200, read and written."""

MILC_WORK = {"improved": (1146, 2400, 1187, 2616), "naive": (570, 1248, 606, 1464)}
"""Operations and bytes of D per site of its result, and of an iteration per site of the lattice; double precision."""

MILC_D, MILC_ITERATION = {"improved": 0.70, "naive": 0.75}, 1 / 1.25
"""Targets on the large lattice: the rates of D and of an iteration, as shares of those at the speed of a copy."""

NPB_CUDA = {"B": 325_900.0, "C": 340_300.0}
"""Mop/s of the CUDA version of NAS FT (GMAP/NPB-GPU) on an H200."""


def app(name: str, ranks: int, *options: str) -> dict[str, Any]:
    """Run a mini-app on GPUs through the command line, and return its exit status and figures."""
    started = time.monotonic()
    words = ["-m", "halox", "run", name, "--device", "gpu", "--json", *options]
    status, said = run(words, ranks, quiet_s=QUIET_S)
    try:
        figures = json.loads(said[said.index("{") : said.rindex("}") + 1])
    except ValueError:
        figures = {"output": said[-2000:]}
    print(f"{name} on {ranks} rank(s): exit status {status}, verified {figures.get('verified')}")
    return {
        "app": name,
        "ranks": ranks,
        "exit_status": status,
        "seconds": round(time.monotonic() - started, 1),
        "figures": figures,
    }


def run_all(gpus: int) -> list[dict[str, Any]]:
    """Run the mini-apps on one rank and, with several GPUs, on two; NAS MG also on more ranks, one per GPU.

    Tests cover mini-apps on ranks that share a GPU.
    """
    stencil = ("--size", "2", "--num-iters", "200", "--passes", "3", "--precision", "double")
    found = []
    for ranks in range(1, min(gpus, 2) + 1):
        found.append(app("stencil2d", ranks, *stencil))
        found.append(app("nas_mg", ranks, "--class", MG_CLASS, "--graph"))
        found += [
            app("nas_ft", ranks, "--class", name, "--passes", "3", "--graph") for name in FT_CLASSES
        ]
        found.append(app("milc", ranks, *MILC_LATTICE, "--gauge", "random", "--graph"))
    for ranks in measured_ranks(gpus)[1:]:
        name = LARGE_MG_CLASS if ranks == LARGE_MG_RANKS else MG_CLASS
        found.append(app("nas_mg", ranks, "--class", name, "--graph"))
    found.append(app("milc", 1, *MILC_LATTICE, "--gauge", "unit", "--precision", "mixed"))
    large = ("--lattice", *map(str, LARGE_MILC), "--gauge", "unit", "--graph")
    for operator in ((), ("--naive",)):
        for precision in ("double", "single"):
            found.append(app("milc", 1, *large, *operator, "--precision", precision))
    return found


def measured_ranks(gpus: int) -> list[int]:
    """Return the numbers of ranks for which figures are measured; two ranks share a single GPU.

    Examples
    --------
    >>> measured_ranks(1), measured_ranks(5), measured_ranks(8)
    ([2], [2, 4], [2, 4, 8])
    """
    return [ranks for ranks in (2, 4, 8) if ranks <= max(gpus, 2)]


def figures_of(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the figures of the successful runs of NAS MG, NAS FT and MILC."""
    return [*multigrid_figures(found), *fourier_figures(found), *milc_figures(found)]


def _ended(found: list[dict[str, Any]], name: str) -> list[tuple[int, dict[str, Any]]]:
    """Return the numbers of ranks and the figures of the successful runs of a mini-app."""
    return [
        (one["ranks"], one["figures"])
        for one in found
        if one["app"] == name and not one["exit_status"]
    ]


def _figure(
    name: str, value: float, unit: str, target: float | None = None, **others: Any
) -> dict[str, Any]:
    """Return a figure; its target, if any, is a lower limit."""
    return {
        "name": name,
        "value": round(value, 4),
        "unit": unit,
        "target": target,
        "at_most": False,
        "met": None if target is None else value >= target,
        **others,
    }


def multigrid_figures(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the figures of NAS MG; the baseline is the rate of one rank in the same class."""
    ended = _ended(found, "nas_mg")
    alone = {one["class"]: one["mops"] for ranks, one in ended if ranks == 1}
    return [
        _figure(
            f"NAS MG class {one['class']}, {ranks} ranks, {one['device']}",
            one["mops"],
            "Mop/s",
            baseline=(mops := alone.get(one["class"])) and round(mops, 3),
            baseline_name="Mop/s on one rank",
            speed_up=mops and round(one["mops"] / mops, 3),
            exchange_share=round(one["exchange_share"], 4),
            **{name: one[name] for name in ("verified", "relative_error", "time_s", "graph")},
        )
        for ranks, one in ended
    ]


def fourier_figures(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the figures of NAS FT; runs on one rank have a target."""
    return [
        _figure(
            f"NAS FT class {one['class']}, {ranks} ranks, {one['device']}",
            one["mops"],
            "Mop/s",
            6 * NPB_CUDA[one["class"]] if ranks == 1 else None,
            baseline=None,
            others={"NPB's CUDA version on one H200, of another run": NPB_CUDA[one["class"]]},
            **{name: one[name] for name in ("verified", "relative_error", "time_s", "graph")},
        )
        for ranks, one in _ended(found, "nas_ft")
    ]


def milc_figures(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the figures of MILC in double precision, whose baseline is the rate of one rank, and of a large lattice.

    The rates of D and of an iteration on the large lattice have targets.
    """
    ended = _ended(found, "milc")
    large = [one for _, one in ended if tuple(one["lattice"]) == LARGE_MILC]
    small = [run for run in ended if run[1]["precision"] == "double" and run[1] not in large]
    alone = next((one["cg_gflops"] for ranks, one in small if ranks == 1), None)
    figures = [
        _figure(
            f"MILC {'x'.join(map(str, one['lattice']))} {one['operator']} double, "
            f"{ranks} ranks, {one['device']}",
            one["cg_gflops"],
            "GFLOPS",
            baseline=alone and round(alone, 3),
            baseline_name="GFLOPS on one rank",
            **{name: one[name] for name in ("verified", "time_s", "graph", "dslash_gflops")},
        )
        for ranks, one in small
    ]
    return [*figures, *(figure for one in large for figure in _large_milc(one))]


def _large_milc(one: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rates of D and of an iteration beside the rates at the speed of a copy."""
    operator = one["operator"]
    flops, nbytes, cg_flops, cg_bytes = MILC_WORK[operator]
    speed = COPY_GB_PER_S * (2 if one["precision"] == "single" else 1)
    name = f"MILC {'x'.join(map(str, LARGE_MILC))} {operator} {one['precision']}"
    found = []
    for what, rate, most, share in (
        ("D", one["dslash_gflops"], flops / nbytes * speed, MILC_D[operator]),
        ("an iteration", one["cg_gflops"], cg_flops / cg_bytes * speed, MILC_ITERATION),
    ):
        label = "GFLOPS at the speed of a copy on an H200"
        found.append(
            _figure(
                f"{name}: {what}, {one['device']}",
                rate,
                "GFLOPS",
                round(share * most),
                baseline=round(most),
                baseline_name=label,
                **{key: one[key] for key in ("verified", "time_s", "graph")},
            )
        )
    return found
