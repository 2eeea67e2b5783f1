"""Figures with their targets: declared beside the rows of a case, measured group by group, shown as a table."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from halox.cli import report
from halox_bench.common.attempt import attempt
from halox_bench.common.rows import GRAPH, SELECTED, STREAM, Row, others, us_of, why_not

Figure = dict[str, Any]
Groups = Mapping[str, Callable[[], Iterable[Figure]]]
Progress = Callable[[str, int, int], None]

BARE_LAUNCH = "launch of an empty CuPy RawKernel with five arguments"

_NOTHING = 'extern "C" __global__ void none(long a, long b, int c, int d, int e) {}'


def bare_launch(cp: Any) -> Callable[[], None]:
    """Return a launch of an empty kernel on CuPy's current stream: no launching call is faster."""
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
        None for information only.
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
    """Return a `figure` with an upper bound, or without a target."""
    return figure(*what, at_most=True, **others)


def over(
    name: str, us: float, baseline_us: float, most: float | None, baseline_name: str, **others: Any
) -> Figure:
    """Return the figure of a time over a baseline's, with an upper bound or without a target.

    Examples
    --------
    >>> over("x", 8.0, 10.0, 0.9, "us of NCCL")["value"]
    0.8
    """
    others = {"us": round(us, 2), **others}
    ratio = us / baseline_us
    return limited(name, ratio, "x its time", most, baseline_us, baseline_name, **others)


def _finite(value: Any) -> Any:
    """Return None for an infinite time: the packer starved, or does not take the type."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def missing(name: str, why: str) -> Figure:
    """Return the entry of a figure that could not be measured."""
    return figure(name, 0.0, "", None, None, "") | {"value": None, "failed": why}


US, OVER, FASTER = "us", "over", "faster"


class Target(NamedTuple):
    """A figure of the rows of a case: the time of a method, alone or beside a baseline's.

    Attributes
    ----------
    what : str
        Name of the figure, with ``{mode}`` for the mode.
    limits : mapping
        Target by mode, None for information only.
    theirs : tuple of str
        Baselines; the first measured one counts.
    form : {"us", "over", "faster"}
        The time, at most the target; over the baseline's time, at most the target; the baseline's time over it, at
        least the target. For the first, a baseline that cannot be captured counts in a stream.
    ours : str
        Name of the method.
    unit, label : str
        Unit of the figure, and words behind the baseline's time.
    required : bool
        Whether a missing time is an error; in a graph it never is for the latter two forms.
    """

    what: str
    limits: Mapping[str, float | None]
    theirs: tuple[str, ...]
    form: str = US
    ours: str = SELECTED
    unit: str = "x"
    label: str = ""
    required: bool = True

    def figures(self, rows: Sequence[Row], **more: Any) -> Iterator[Figure]:
        """Yield a figure for each mode, with the times of all methods and further entries."""
        for mode, limit in self.limits.items():
            name = self.what.format(mode=mode)
            us = us_of(rows, self.ours, mode)
            theirs, their_us = self._beside(rows, mode)
            if us is None or (their_us is None and self.form != US):
                if self.required and (mode != GRAPH or self.form == US):
                    absent = self.ours if us is None else self.theirs[0]
                    yield missing(name, why_not(rows, absent, mode))
                continue
            label = self.label or f"us of {theirs}"
            path = next(row.path for row in rows if (row.name, row.mode) == (self.ours, mode))
            beside = {"others": others(rows, mode), "path": path, **more}
            if self.form == US:
                yield limited(name, us, "us", limit, their_us, label, **beside)
            elif self.form == OVER:
                yield over(name, us, their_us or 0.0, limit, label, **beside)
            else:
                ratio = (their_us or 0.0) / us
                beside["us"] = round(us, 2)
                yield figure(name, ratio, self.unit, limit, their_us, label, **beside)

    def _beside(self, rows: Sequence[Row], mode: str) -> tuple[str, float | None]:
        modes = (mode, STREAM) if self.form == US else (mode,)
        for name in self.theirs:
            for one in modes:
                us = us_of(rows, name, one)
                if us is not None:
                    return name, us
        return self.theirs[0], None


def measured(groups: Groups, budget_s: float, progress: Progress, comm: Any = None) -> list[Figure]:
    """Measure groups of figures in turn.

    Parameters
    ----------
    groups : mapping
        Function that measures each group, by name.
    budget_s : float
        No new group begins after so many seconds; the remaining groups become entries with the reason.
    progress : callable
        Called with the name of each group.
    comm : mpi4py.MPI.Intracomm, optional
        Ranks that measure together; the figures are the same on all of them.

    Returns
    -------
    list of dict
        Results of `figure`; without a measurement, ``value`` and ``met`` are None and ``failed`` is the reason.
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
        # A failed group does not end the run.
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
