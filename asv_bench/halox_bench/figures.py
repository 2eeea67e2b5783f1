"""Figures with targets: measured case by case as the table says, and shown as a table."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from halox.cli import report
from halox_bench.bench import Bench, attempt
from halox_bench.kinds import Kind
from halox_bench.rows import GRAPH, STREAM, Row, choices, find, right
from halox_bench.targets import BEST, CHOICE, FASTER, OVER, US, Target, on, place

Figure = dict[str, Any]


def figure(
    name: str,
    value: float,
    unit: str,
    target: float | None,
    baseline: float | None,
    baseline_name: str,
    *,
    at_most: bool = True,
    **others: Any,
) -> Figure:
    """Return one figure as a dict; a target of None is for information."""
    met = None
    if target is not None:
        met = bool(value <= target if at_most else value >= target)
    return {
        "name": name,
        "value": round(value, 4) if math.isfinite(value) else None,
        "unit": unit,
        "baseline": None if baseline is None else round(baseline, 3),
        "baseline_name": baseline_name,
        "target": target,
        "at_most": at_most,
        "met": met,
        **others,
    }


def missing(name: str, why: str) -> Figure:
    return figure(name, 0.0, "", None, None, "") | {"value": None, "failed": why}


def of_rows(target: Target, rows: Sequence[Row], ranks: int) -> Iterator[Figure]:
    """Yield the figures of a target, given the rows of its cases.

    A figure of a graph is left out where its method or baseline cannot be captured, and a ratio where the baseline is
    missing. Without the method itself there is an entry with the reason.
    """
    for mode, limit in target.limits.items():
        if target.form == CHOICE:
            compared = choices(rows)
            if compared:
                worst = max(compared, key=lambda one: float(one["ratio"]))
                label = f"x, the largest ratio: {worst['case']}, {worst['mode']}"
                share = sum(one["close"] for one in compared) / len(compared)
                yield figure(
                    target.name, share, "share", limit, worst["ratio"], label, at_most=False
                )
            continue
        if mode == BEST:
            is_captured = find(rows, target.ours, GRAPH, target.case) is not None
            mode = GRAPH if is_captured else STREAM
        name = target.name.replace("<ranks>", str(ranks)).replace("<mode>", mode)
        ours = find(rows, target.ours, mode, target.case)
        theirs = _first(target, rows, mode)
        if ours is None:
            if mode != GRAPH:
                yield missing(name, _why(rows, target.ours, mode))
            continue
        if theirs is None and target.form != US:
            continue
        yield _of(target, name, ours, theirs, limit, _others(rows, ours, mode))


def _first(target: Target, rows: Sequence[Row], mode: str) -> Row | None:
    """Return the first baseline that was measured, in a stream if it cannot be captured, or does not depend on it."""
    case = target.their_case or target.case
    if target.form == OVER and mode == GRAPH:
        modes: tuple[str, ...] = (mode,)
    else:
        modes = (mode, STREAM)
    found = (find(rows, name, one, case) for name in target.theirs for one in modes)
    return next(filter(None, found), None)


def _of(
    target: Target,
    name: str,
    ours: Row,
    theirs: Row | None,
    limit: float | None,
    more: dict[str, Any],
) -> Figure:
    us, baseline = ours.us or 0.0, None if theirs is None else theirs.us
    label = f"us of {theirs.name}" if theirs else ""
    if target.form == US:
        if target.relative and limit is not None and baseline is not None:
            limit = round(limit * baseline, 2)
        return figure(name, us, "us", limit, baseline, label, **more)
    ratio = us / (baseline or us)
    more["us"] = round(us, 2)
    if target.form == FASTER:
        return figure(name, 1 / ratio, target.unit, limit, baseline, label, at_most=False, **more)
    return figure(name, ratio, "x its time", limit, baseline, label, **more)


def _others(rows: Sequence[Row], ours: Row, mode: str) -> dict[str, Any]:
    """Return the times of all methods on the same case, the path, and the bytes."""
    times = {
        row.name: round(row.us, 2)
        for row in rows
        if row.us and row.case == ours.case and row.mode == mode
    }
    known = ("bytes_each_way", "bytes_sent", "gb_per_s")
    details = {name: ours.details[name] for name in known if name in ours.details}
    return {"others": times, "path": ours.path, **details}


def _why(rows: Sequence[Row], name: str, mode: str) -> str:
    errors = (row.error for row in rows if (row.name, row.mode) == (name, mode))
    return next(filter(None, errors), f"{name} was not measured in a {mode}")


def measured(
    kind: Kind, bench: Bench, args: argparse.Namespace, progress: Callable[[str, int, int], None]
) -> list[Figure]:
    """Measure all figures of a kind on these ranks, the same on all of them; collective.

    No case is begun after the kind's budget of seconds: the remaining ones become entries with that reason. A case that
    fails does not end the run.
    """
    where = place(bench.comm.size, on_gpu=bench.on_gpu, shared_gpu=bench.shared_gpu)
    groups: dict[str, list[Target]] = {}
    for target in on(where, bench.comm.size, kind.name):
        groups.setdefault(target.words, []).append(target)
    # Without words are the figures of all cases.
    last = [groups.pop("")] if any(one.form == CHOICE for one in groups.get("", ())) else []
    began, every, found = time.monotonic(), list[Row](), list[Figure]()
    for number, (words, group) in enumerate(groups.items()):
        progress(words, number, len(groups))
        if bench.comm.bcast(time.monotonic() - began > kind.budget_s):
            found.append(missing(f"{kind.name} {words}", f"left out after {kind.budget_s:.0f} s"))
            continue
        rows, error = attempt(bench.comm, lambda words=words: _rows(kind, bench, args, words))  # type: ignore[misc]
        if rows is None:
            found.append(missing(f"{kind.name} {words}", f"{type(error).__name__}: {error}"))
            continue
        every += rows
        found += [one for target in group for one in of_rows(target, rows, bench.comm.size)]
    for group in last:
        found += [one for target in group for one in of_rows(target, every, bench.comm.size)]
    return bench.comm.bcast(found)  # type: ignore[no-any-return]


def _rows(kind: Kind, bench: Bench, args: argparse.Namespace, words: str) -> list[Row]:
    given = kind.parsed(words)
    given.repeats, given.quick = args.repeats or given.repeats, args.quick
    return [row for case in kind.cases(given) for row in right(kind.measure(bench, given, case))]


def shown(found: Iterable[Figure]) -> str:
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
