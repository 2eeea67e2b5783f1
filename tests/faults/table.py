"""The fault matrix. Each row is a story: a fault hits one rank during a collective call.

::

    calls.CALLS  x  path  x  fault (killed, stopped, raising, elsewhere)  x  stage (before, early, halfway, late)

Tests run the rows in `QUICK` by default, and the others with ``pytest -n 0 -m exhaustive tests/faults``.
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

FAULTS = (
    "killed",
    "stopped for long",
    "stopped for a while",
    "raising",
    "elsewhere",
)
"""Faults of the last rank: SIGKILL; SIGSTOP until the others have raised an error; SIGSTOP for SHORT_S; an
exception, after which the rank makes no more calls; a call that differs from the call of the others."""

STAGES = {"before": 0.0, "early": 0.1, "halfway": 0.5, "late": 0.9}
"""Time of the fault: before the call, or after it has entered this share of the halox functions that it enters."""


@dataclass(frozen=True)
class Row:
    """One story."""

    call: str
    path: str
    fault: str
    stage: str

    @property
    def name(self) -> str:
        return f"{self.path}-{self.fault}-{self.call}-{self.stage}"

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

    @property
    def is_quick(self) -> bool:
        """Whether the row runs by default."""
        chosen = QUICK.get((self.path, self.fault), {}).get(self.stage, ())
        return self.call in chosen


ALL = tuple(CALLS)
_EXCHANGING = ("exchange, first", "exchange, cached", "plan.finish")
_CACHED = ("exchange, cached", "sum, cached", "Transpose.forward, cached")
_ON_GPU = ("exchange, first", "exchange, cached", "plan.finish", "sum, cached")
_KILLED = ("Grid", "exchange, first", "exchange, cached", "sum, cached")

QUICK: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {
    ("host/shared", "raising"): {"before": ALL, "halfway": ("Grid",)},
    ("host/direct", "raising"): {"before": _EXCHANGING},
    ("host/mpi", "raising"): {"before": ("Grid", "gather", "Allreduce()", *_EXCHANGING, *_CACHED)},
    ("host/shared", "elsewhere"): {"before": ALL},
    ("host/direct", "elsewhere"): {"before": _EXCHANGING},
    ("host/mpi", "elsewhere"): {"before": ALL},
    ("host/shared", "stopped for a while"): {"halfway": ALL},
    ("host/direct", "stopped for a while"): {"halfway": _EXCHANGING},
    ("host/mpi", "stopped for a while"): {"halfway": ("Grid", "gather", *_EXCHANGING, *_CACHED)},
    ("host/shared", "stopped for long"): {"halfway": ("exchange, cached", "close")},
    ("host/mpi", "stopped for long"): {"before": ("exchange, cached", "sum, first")},
    ("host/shared", "killed"): {"halfway": _KILLED},
    ("host/mpi", "killed"): {"before": ("gather",), "halfway": ("exchange, cached",)},
    ("scatter_gather/process_vm", "raising"): {"before": _EXCHANGING},
    ("scatter_gather/process_vm", "stopped for a while"): {"halfway": _EXCHANGING},
    ("scatter_gather/process_vm", "stopped for long"): {"halfway": ("exchange, cached",)},
    ("scatter_gather/process_vm", "killed"): {"halfway": ("exchange, first", "exchange, cached")},
}
for _path in GPU_PATHS:
    QUICK |= {
        (_path, "raising"): {"before": _ON_GPU},
        (_path, "elsewhere"): {"before": ("exchange, cached",)},
        (_path, "stopped for a while"): {"halfway": ("exchange, cached",)},
        (_path, "stopped for long"): {"halfway": ("exchange, cached",)},
        (_path, "killed"): {"halfway": ("Grid", "exchange, cached")},
    }
for _path in PEER_PATHS:
    QUICK |= {
        (_path, "raising"): {"before": ("exchange, cached", "plan.finish")},
        (_path, "killed"): {"halfway": ("exchange, cached",)},
    }
"""Calls of the rows that run by default, by path and fault, then by stage."""


def rows(paths: tuple[str, ...] = CPU_PATHS) -> list[Row]:
    """Return all stories on some paths, ordered so that stories that can share processes are adjacent."""
    found = [
        Row(call, path, fault, stage)
        for path in paths
        for fault in FAULTS
        for stage in STAGES
        for call in CALLS
        if _has_meaning(call, path, fault, stage)
    ]
    # Quick rows first, so that they are adjacent.
    return sorted(found, key=lambda row: (not row.is_quick, row.fault == "killed"))


def _has_meaning(call: str, path: str, fault: str, stage: str) -> bool:
    if path not in CALLS[call].paths:
        return False
    if fault == "elsewhere":
        # The last rank has sent all its messages in start(), so finish() succeeds on every other rank.
        return stage == "before" and call != "plan.finish"
    return True
