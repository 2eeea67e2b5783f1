"""Cost constants of a protocol from measured times: non-negative least squares, robust against outliers."""

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

    Not collective. Minimises the sum of relative errors, by least squares with weights that each round computes
    from the errors. So an error of 5 us in 50 weighs as much as an error of 0.5 us in 5, and an outlier has little
    influence. Constants are never negative, and longer runs are never slower: the unknowns are the latency, the time
    per message, the time per byte of the longest runs, and for each shorter length the additional time per byte.
    """
    used = [sample for sample in samples if sample.us > 0 and math.isfinite(sample.us)]
    if not used:
        return None
    matrix = np.array([_row(sample) for sample in used])
    # Scale the unknowns to similar size: bytes are many, messages few.
    scale = np.abs(matrix).max(axis=0)
    measured = np.array([sample.us for sample in used])
    present = scale > 0
    # If all exchanges have equally many messages, the time per message cannot be told from the latency.
    present[1] = np.ptp(matrix[:, 1]) > 0
    if not present[[0, *range(2, len(scale))]].all():
        return None
    columns = matrix[:, present] / scale[present] / measured[:, None]
    if np.linalg.matrix_rank(columns) < columns.shape[1]:
        return None
    found = np.zeros(len(scale))
    found[present] = _least_absolute(columns, np.ones(len(used))) / scale[present]
    per_byte = np.cumsum(found[:1:-1])[::-1]  # from the longest runs to the shortest
    speeds = [
        min(FASTEST_GB_PER_S, 1e-3 / cost) if cost > 0 else FASTEST_GB_PER_S for cost in per_byte
    ]
    return ProtocolCost(float(found[0]), float(found[1]), tuple(float(speed) for speed in speeds))


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
    """Guess the constants of a protocol that could not be measured, "path/protocol", from other protocols of its path.

    The guess scales the protocol's constants in ``before`` by the mean change of the path's other protocols, from
    ``before`` to ``fitted``. None if no other protocol of the path was measured. Without the guess, old constants would
    be compared with new measurements as if they had been measured, too.
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
    """Return the factor of each unknown in a sample's time."""
    weights = run_weights(sample.run_bytes)
    # The additional time of a run length applies to that length and to all shorter lengths.
    paid = [sample.nbytes * sum(weights[: i + 1]) for i in range(len(RUN_BYTES))]
    return [1.0, float(max(sample.messages - 1, 0)), *paid]


def _least_absolute(matrix: Floats, target: Floats) -> Floats:
    """Minimise the sum of ``|matrix @ x - target|`` over x >= 0, by least squares with renewed weights."""
    weights = np.ones(len(target))
    found = np.zeros(matrix.shape[1])
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)
        found = _non_negative(matrix * root[:, None], target * root)
        weights = 1.0 / np.maximum(np.abs(matrix @ found - target), 1e-6)
    return found


def _non_negative(matrix: Floats, target: Floats) -> Floats:
    """Solve the least squares problem with x >= 0 (Lawson and Hanson 1974, algorithm NNLS)."""
    size = matrix.shape[1]
    free = np.zeros(size, bool)
    x = np.zeros(size)
    tolerance = 1e-12 * max(float(np.abs(matrix.T @ target).max()), 1e-300)
    for _ in range(10 * size):
        gradient = matrix.T @ (target - matrix @ x)
        if free.all() or (gradient[~free] <= tolerance).all():
            break
        free[np.argmax(np.where(free, -np.inf, gradient))] = True
        while free.any():
            trial = np.zeros(size)
            trial[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            negative = free & (trial <= 0)
            if not negative.any():
                break
            # Go towards the trial point, only so far that all unknowns stay non-negative.
            step = float(np.min(x[negative] / np.maximum(x[negative] - trial[negative], 1e-300)))
            x = x + step * (trial - x)
            free &= x > 1e-15
            x[~free] = 0.0
        x = np.where(free, trial, 0.0)
    return x
