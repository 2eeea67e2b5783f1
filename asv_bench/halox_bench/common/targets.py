"""Figures with their targets: measured group by group within a time, shown as a table, written as JSON."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from halox.cli import report
from halox_bench.common.attempt import attempt

Figure = dict[str, Any]
Groups = Mapping[str, Callable[[], Iterable[Figure]]]
Progress = Callable[[str, int, int], None]

BARE_LAUNCH = "launch of an empty CuPy RawKernel with five arguments"

_NOTHING = 'extern "C" __global__ void none(long a, long b, int c, int d, int e) {}'


def bare_launch(cp: Any) -> Callable[[], None]:
    """Return a launch of an empty kernel on CuPy's current stream: the floor of every call that launches."""
    kernel = cp.RawKernel(_NOTHING, "none")
    arguments = tuple(kind(0) for kind in (cp.int64, cp.int64, cp.int32, cp.int32, cp.int32))
    return lambda: kernel((1,), (1,), arguments)


def figure(
    name: str,
    value: float,
    unit: str,
    target: float | None,
    baseline: float | None,
    baseline_name: str,
    *,
    at_most: bool = False,
    **others: Any,
) -> Figure:
    """Return one figure as a dict.

    Parameters
    ----------
    target : float or None
        None for a figure that stands there to be seen.
    at_most : bool
        Whether the target is an upper bound.
    **others
        Further entries.

    Examples
    --------
    >>> figure("x", 0.954, "share", 0.9, 12.3456, "us of a copy")["met"]
    True
    """
    met = None
    if target is not None:
        met = bool(value <= target if at_most else value >= target)
    return {
        "name": name,
        "value": _finite(round(value, 4)),
        "unit": unit,
        "baseline": None if baseline is None else _finite(round(baseline, 3)),
        "baseline_name": baseline_name,
        "target": target,
        "at_most": at_most,
        "met": met,
        **{key: _finite(other) for key, other in others.items()},
    }


def limited(*what: Any, **others: Any) -> Figure:
    """Return a `figure` with an upper bound, or with none."""
    return figure(*what, at_most=True, **others)


def over(
    name: str, us: float, baseline_us: float, most: float | None, baseline_name: str, **others: Any
) -> Figure:
    """Return the figure of a time over a baseline's, with an upper bound or none.

    Examples
    --------
    >>> over("x", 8.0, 10.0, 0.9, "us of NCCL")["value"]
    0.8
    """
    others = {"us": round(us, 2), **others}
    ratio = us / baseline_us
    return limited(name, ratio, "x its time", most, baseline_us, baseline_name, **others)


def _finite(value: Any) -> Any:
    """Return None for an infinite time: that of a packer which starved or does not take a type."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def missing(name: str, why: str) -> Figure:
    """Return the place of figures that could not be measured."""
    return figure(name, 0.0, "", None, None, "") | {"value": None, "failed": why}


def measured(groups: Groups, budget_s: float, progress: Progress, comm: Any = None) -> list[Figure]:
    """Measure groups of figures in turn.

    Parameters
    ----------
    groups : mapping
        Function that measures each group, by name.
    budget_s : float
        No new group is begun after so many seconds; what is left out says so.
    progress : callable
        Told what comes next.
    comm : mpi4py.MPI.Intracomm, optional
        Ranks that measure together: the figures are the same on all of them.

    Returns
    -------
    list of dict
        Results of `figure`; if one could not be measured, ``value`` and ``met`` are None and ``failed`` is the reason.
    """

    def agreed(value: Any) -> Any:
        return value if comm is None else comm.bcast(value)

    began = time.monotonic()
    found: list[Figure] = []
    for number, (name, group) in enumerate(groups.items()):
        progress(name, number, len(groups))
        if agreed(time.monotonic() - began > budget_s):
            found.append(missing(name, f"left out after {budget_s:.0f} s"))
            continue
        # The other figures are still wanted.
        figures, error = attempt(comm, lambda group=group: list(group()))  # type: ignore[misc]
        found += figures or ([missing(name, f"{type(error).__name__}: {error}")] if error else [])
    return agreed(found)  # type: ignore[no-any-return]


def shown(found: Iterable[Figure]) -> str:
    """Return a table of figures."""
    rows = [
        {
            "figure": one["name"],
            "value": one["value"],
            "unit": one["unit"],
            "target": "-"
            if one["target"] is None
            else f"{'<=' if one['at_most'] else '>='} {one['target']}",
            "met": "-" if one["met"] is None else one["met"],
            "beside": one.get("failed") or f"{one['baseline']} {one['baseline_name']}",
        }
        for one in found
    ]
    return "\n".join(report.table(rows))
