"""The fault matrix. Each row is a story: a fault hits one rank during a collective call.

::

    calls.CALLS  x  path  x  fault (killed, stopped, raising, elsewhere)  x  stage (before, halfway)

The whole matrix of the tests runs the part of it in `ROWS`, the usual tests the rows in `USUAL`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.faults.calls import CALLS, CPU_PATHS, GPU_PATHS, PEER_PATHS

LIMIT_S = 1.0
"""HALOX_TIMEOUT if a rank is gone."""

SLACK_S = 60.0
"""Longest delay of the error beyond the limit; a busy machine may need it."""

ELSEWHERE_S = 20.0
"""HALOX_TIMEOUT if ranks make different calls, which they detect after a second or two."""

SHORT_S = 0.25
"""Duration of a short stop, which the others wait for."""

PATIENT_S = 60.0
"""HALOX_TIMEOUT if all ranks make the call in the end."""

STAGES = {"before": 0.0, "halfway": 0.5}
"""Time of the fault: before the call, or after it has entered this share of the halox functions that it enters."""


@dataclass(frozen=True)
class Row:
    """One story.

    The faults of the last rank: "killed" by SIGKILL; "stopped for long", by SIGSTOP until the others have raised an
    error; "stopped for a while", by SIGSTOP for SHORT_S; "raising" an exception, after which the rank makes no more
    calls; "elsewhere", in a call that differs from the call of the others.
    """

    call: str
    path: str
    fault: str
    stage: str

    @property
    def name(self) -> str:
        return f"{self.path}-{self.fault}-{self.call}-{self.stage}"

    @property
    def is_rare(self) -> bool:
        """Whether only the whole matrix has this row of a path between host arrays."""
        usual = USUAL.get((self.path, self.fault), {})
        return self.call not in usual.get(self.stage, ())

    @property
    def is_short(self) -> bool:
        """Whether all ranks complete the call."""
        return self.fault == "stopped for a while"

    @property
    def limit_s(self) -> float:
        """HALOX_TIMEOUT during the story."""
        if self.is_short:
            return PATIENT_S
        return ELSEWHERE_S if self.fault == "elsewhere" else LIMIT_S


ALL = tuple(CALLS)
_EXCHANGING = ("exchange, first", "exchange, cached", "plan.finish")
_CACHED = ("exchange, cached", "sum, cached", "Transpose.forward, cached")
_MAIN = ("Grid", "gather", "Allreduce()", "exchange, first", *_CACHED)
_ON_GPU = ("exchange, first", "exchange, cached", "plan.finish", "sum, cached")
_KILLED = ("Grid", "exchange, first", "exchange, cached", "sum, cached")

USUAL: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {
    ("host/shared", "raising"): {"before": ALL[0::2], "halfway": ("exchange, cached",)},
    ("host/shared", "elsewhere"): {"before": ALL[1::2]},
    ("host/shared", "stopped for a while"): {"halfway": ("gather",)},
    ("host/shared", "stopped for long"): {"halfway": ("close",)},
    ("host/shared", "killed"): {"halfway": ("Grid", "sum, cached")},
    ("host/direct", "raising"): {"before": ("plan.finish",)},
    ("host/mpi", "elsewhere"): {"before": ("exchange, first",)},
    ("host/mpi", "stopped for a while"): {"halfway": ("exchange, cached",)},
    ("host/mpi", "killed"): {"before": ("gather",)},
    ("scatter_gather/process_vm", "stopped for long"): {"halfway": ("exchange, cached",)},
    ("scatter_gather/process_vm", "killed"): {"halfway": ("exchange, first",)},
}
"""Rows outside the whole matrix: each call once, and each fault on several paths."""

ROWS: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {
    ("host/shared", "raising"): {"before": ALL, "halfway": ("Grid", "exchange, cached")},
    ("host/direct", "raising"): {"before": _EXCHANGING},
    ("host/mpi", "raising"): {"before": ("Grid", "gather", "Allreduce()", *_EXCHANGING, *_CACHED)},
    ("host/shared", "elsewhere"): {"before": ALL},
    ("host/direct", "elsewhere"): {"before": ("exchange, first", "exchange, cached")},
    ("host/mpi", "elsewhere"): {"before": _MAIN},
    ("host/shared", "stopped for a while"): {"halfway": (*_MAIN, "plan.finish")},
    ("host/direct", "stopped for a while"): {"halfway": ("exchange, cached",)},
    ("host/mpi", "stopped for a while"): {"halfway": ("gather", "exchange, cached")},
    ("host/shared", "stopped for long"): {"halfway": ("exchange, cached", "close")},
    ("host/mpi", "stopped for long"): {"before": ("exchange, cached", "sum, first")},
    ("host/shared", "killed"): {"before": ("exchange, cached",), "halfway": _KILLED},
    ("host/mpi", "killed"): {"before": ("gather",), "halfway": ("exchange, cached",)},
    ("scatter_gather/process_vm", "raising"): {"before": _EXCHANGING},
    ("scatter_gather/process_vm", "stopped for a while"): {"halfway": ("exchange, cached",)},
    ("scatter_gather/process_vm", "stopped for long"): {"halfway": ("exchange, cached",)},
    ("scatter_gather/process_vm", "killed"): {"halfway": ("exchange, first", "exchange, cached")},
}
for _path in GPU_PATHS:
    ROWS |= {
        (_path, "raising"): {"before": _ON_GPU},
        (_path, "elsewhere"): {"before": ("exchange, cached",)},
        (_path, "stopped for a while"): {"halfway": ("exchange, cached",)},
        (_path, "stopped for long"): {"halfway": ("exchange, cached",)},
        (_path, "killed"): {"halfway": ("Grid", "exchange, cached")},
    }
for _path in PEER_PATHS:
    ROWS |= {
        (_path, "raising"): {"before": ("exchange, cached", "plan.finish")},
        (_path, "killed"): {"halfway": ("exchange, cached",)},
    }
"""Calls of the rows, by path and fault, then by stage."""


def rows(paths: tuple[str, ...] = CPU_PATHS) -> list[Row]:
    """Return the stories on some paths, ordered so that stories that can share processes are adjacent."""
    found = [
        Row(call, path, fault, stage)
        for (path, fault), stages in ROWS.items()
        for stage, calls in stages.items()
        for call in dict.fromkeys(calls)
        # A rank that makes another call than finish() has sent all its messages in start(), so finish() succeeds.
        if path in paths and not (fault == "elsewhere" and call == "plan.finish")
    ]
    return sorted(found, key=lambda row: row.fault == "killed")
