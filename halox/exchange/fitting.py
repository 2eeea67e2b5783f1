"""Cost constants of a protocol from measured times, by least squares of relative errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from halox.exchange.costs import protocol_name
from halox.paths.costs import RUN_BYTES, ProtocolCost, run_weights

Floats = npt.NDArray[np.float64]

FASTEST_GB_PER_S = 20_000.0
"""Bandwidth of a protocol whose time does not grow with the bytes, so that no bandwidth can be measured."""

_ROUNDS = 30


@dataclass(frozen=True)
class Sample:
    """One measurement: an exchange of ``messages`` messages, ``nbytes`` bytes in all, took ``us``."""

    nbytes: int
    run_bytes: int
    messages: int
    us: float


def fit(samples: Sequence[Sample]) -> ProtocolCost | None:
    """Return the constants with the best fit; None if the samples leave a constant undetermined.

    Not collective. Minimises the sum of relative errors, by least squares with weights that each round computes from
    the errors. So an error of 5 us in 50 weighs as much as an error of 0.5 us in 5, and an outlier has little
    influence. Constants are never negative, and longer runs are never slower: the unknowns are the latency, the time
    per message, the time per byte of the longest runs, and for each shorter length the additional time per byte.
    """
    used = [sample for sample in samples if sample.us > 0 and math.isfinite(sample.us)]
    if not used:
        return None
    matrix = np.array([_row(sample) for sample in used])
    # If all exchanges have equally many messages, the time per message cannot be separated from the latency.
    has_message_us = np.ptp(matrix[:, 1]) > 0
    matrix[:, 1] *= has_message_us
    # Bytes are many, messages few: scale the unknowns to similar size. Divide by the times for relative errors.
    scale = np.maximum(matrix.max(axis=0), 1)
    matrix = matrix / scale / np.array([[sample.us] for sample in used])
    if np.linalg.matrix_rank(matrix) < matrix.shape[1] - (not has_message_us):
        return None
    weights = np.ones(len(used))
    for _ in range(_ROUNDS):
        unknowns = _non_negative(matrix * weights[:, None], weights)
        weights = 1 / np.sqrt(np.maximum(np.abs(matrix @ unknowns - 1), 1e-6))
    unknowns /= scale
    per_byte = np.cumsum(unknowns[:1:-1])[::-1]  # from the longest runs to the shortest
    speeds = [1e-3 / max(cost, 1e-3 / FASTEST_GB_PER_S) for cost in per_byte]
    return ProtocolCost(
        float(unknowns[0]), float(unknowns[1]), tuple(float(speed) for speed in speeds)
    )


def _non_negative(matrix: Floats, target: Floats) -> Floats:
    """Solve a least squares problem; unknowns that would be negative are 0."""
    unknowns = np.zeros(matrix.shape[1])
    free = np.arange(len(unknowns))
    while True:
        unknowns[free] = np.linalg.lstsq(matrix[:, free], target)[0]
        if (unknowns >= 0).all():
            return unknowns
        free = np.flatnonzero(unknowns > 0)
        unknowns[:] = 0


def error_of(cost: ProtocolCost, samples: Sequence[Sample]) -> float:
    """Return the median relative error of a protocol's constants over some samples."""
    return float(
        np.median([abs(cost.us(s.nbytes, s.run_bytes, s.messages) / s.us - 1) for s in samples])
    )


def follow_siblings(
    missing: str,
    fitted: Mapping[str, ProtocolCost],
    before: Mapping[str, ProtocolCost],
    shared_gpu: bool,
) -> ProtocolCost | None:
    """Guess the constants of the protocol ``missing``, "path/protocol", which could not be measured.

    The guess scales the protocol's constants in ``before`` by the mean change of the path's other protocols, from
    ``before`` to ``fitted``. None if no other protocol of the path was measured. Without the guess, the choice would
    compare the protocol's old constants with new measurements of other protocols.
    """
    path, _, protocol = missing.partition("/")
    name = protocol_name(path, protocol, shared_gpu)
    siblings = [n for n in fitted if n.startswith(f"{path}/") and n in before and n != name]
    old = before.get(name)
    if old is None or not siblings:
        return None

    def ratio(of: Callable[[ProtocolCost], float]) -> float:
        ratios = [
            math.log(of(fitted[n]) / of(before[n]))
            for n in siblings
            if of(fitted[n]) > 0 and of(before[n]) > 0
        ]
        return math.exp(sum(ratios) / len(ratios)) if ratios else 1.0

    speeds = [
        min(speed * ratio(partial(_speed, i)), FASTEST_GB_PER_S)
        for i, speed in enumerate(old.gb_per_s)
    ]
    for i in range(1, len(speeds)):
        speeds[i] = max(speeds[i], speeds[i - 1])
    return ProtocolCost(
        old.latency_us * ratio(lambda cost: cost.latency_us),
        old.message_us * ratio(lambda cost: cost.message_us),
        tuple(speeds),
    )


def _speed(i: int, cost: ProtocolCost) -> float:
    return cost.gb_per_s[i]


def _row(sample: Sample) -> list[float]:
    weights = run_weights(sample.run_bytes)
    # The additional time of a run length applies to that length and to all shorter lengths.
    paid = [sample.nbytes * sum(weights[: i + 1]) for i in range(len(RUN_BYTES))]
    return [1.0, float(max(sample.messages - 1, 0)), *paid]
