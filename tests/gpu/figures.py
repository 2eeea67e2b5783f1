"""The page docs/performance/figures.md, from what `make gpu-check` wrote: ``python3 -m tests.gpu.figures``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "performance"
PAGE = FOLDER / "figures.md"
RUNS = (
    "gpu-check.json",
    "gpu-check-one-gpu.json",
    "gpu-check-two-h100.json",
    "gpu-check-four-gpus.json",
)

_HEAD = """# Figures of the GPU check

Written by `python3 -m tests.gpu.figures` from the files that `make gpu-check` leaves; a test holds this page against
them. Each figure stands beside its baseline, measured in the same run. A target is for H200s, and "at most" unless it
says otherwise. Of a run with earlier sources there are only figures that no run with the present ones has.
"""


def number(value: Any) -> str:
    """Write a figure with as many digits as mean something."""
    if value is None:
        return "-"
    if not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def target(figure: dict[str, Any]) -> str:
    """Write what a figure should be, and whether it is."""
    if figure.get("target") is None:
        return ""
    least = "" if figure.get("at_most", True) else "at least "
    return f"{least}{number(figure['target'])}: {'met' if figure['met'] else '**not met**'}"


def failures(tests: list[dict[str, Any]]) -> list[str]:
    """Return a line for each test that neither passed nor was skipped."""
    bad = [one for one in tests if one["outcome"] not in ("passed", "skipped")]
    lines = [f"- `{one['test']}` on {one['ranks']} rank(s): {one['outcome']}" for one in bad]
    return [*lines, ""] if lines else []


def table(found: list[dict[str, Any]]) -> list[str]:
    """Return the rows of a table of figures."""
    rows = ["| figure | value | beside | target |", "| --- | --- | --- | --- |"] if found else []
    for one in found:
        if "failed" in one:
            rows.append(f"| {one['name']} | {one['failed']} | | |")
            continue
        beside = ""
        if one.get("baseline") is not None:
            beside = f"{number(one['baseline'])} {one.get('baseline_name', '')}"
        others = ", ".join(f"{name} {number(us)}" for name, us in one.get("others", {}).items())
        beside += f" ({others})" if others else ""
        value = f"{number(one['value'])} {one['unit']}"
        rows.append(f"| {one['name']} | {value} | {beside} | {target(one)} |")
    return rows


def page(folder: Path = FOLDER) -> str:
    """Return the page's text."""
    lines = [_HEAD]
    runs = {file: json.loads((folder / file).read_text(encoding="utf-8")) for file in RUNS}
    present = runs[RUNS[0]]["sources_sha256"]
    known = {
        one["name"]
        for run in runs.values()
        if run["sources_sha256"] == present
        for one in run["benchmarks"]
    }
    for file, run in runs.items():
        machine, is_present = run["machine"], run["sources_sha256"] == present
        found = [one for one in run["benchmarks"] if is_present or one["name"] not in known]
        gpus = f"{len(machine['gpus'])} x {machine['gpus'][0]}"
        lines += [
            f"## {gpus}: `{file}`",
            "",
            f"{run['made']}; CUDA {machine['cuda_runtime']}, driver {machine['cuda_driver']}, CuPy {machine['cupy']}, "
            f"mpi4py {machine['mpi4py']}, {machine['mpi']}, {machine['cores']} cores. Tests: {run['passed']} passed, "
            f"{run['failed']} failed, {run.get('skipped', 0)} need what this machine has not. "
            f"{'' if run.get('ended', True) else 'The run was cut short: what is missing was not measured. '}"
            f"Sources `{run['sources_sha256'][:16]}`{'' if is_present else ', earlier ones'}.",
            "",
            *failures(run["tests"]),
            *table(found),
            "",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
