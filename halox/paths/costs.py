"""The cost model of a protocol: constants for the choice between paths.

The time of one exchange that carries ``messages`` messages of ``nbytes`` bytes in all, in runs of b bytes, is::

    latency_us + (messages - 1) * message_us + nbytes / bandwidth(b)

Launches, flags and waits are in the latency, so that the messages of one exchange pay for them once. The bandwidth is
end to end, packing and unpacking included. It is known at a few lengths of runs; between them the time per byte is
interpolated linearly over the logarithm of the length.

Both ends of a message call the model with the same numbers (the shorter of their two run lengths, and whether either
end shares its GPU) and with the same constants (`halox.plans.calibration.agreed_costs`), so that they get the same
answer. NumPy arrays have no model: their protocols follow fixed rules (`halox.paths.host`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from halox.errors import HaloxError

RUN_BYTES = (8, 32, 128, 1024)
"""Lengths of runs with known bandwidths; longer runs are as fast as the last length."""

_B_PER_US = 1e3
"""Bytes per microsecond in one GB/s."""


_MOST = 1e12
_LEAST_GB_PER_S = 1e-9
"""Bounds of valid constants; within them no prediction overflows."""


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 <= value <= _MOST


@dataclass(frozen=True)
class ProtocolCost:
    """Constants of one protocol."""

    latency_us: float  # of an exchange of one message without bytes
    message_us: float  # added by each further message of the same exchange
    # Payload bandwidths for runs of `RUN_BYTES`, never falling with longer runs; 1 GB is 1e9 bytes.
    gb_per_s: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raise a `HaloxError` unless the numbers, which may be read from a file, are valid and ascending."""
        numbers = (self.latency_us, self.message_us, *self.gb_per_s)
        if not all(_is_number(number) for number in numbers):
            raise HaloxError(
                f"constants of a path must be numbers from 0 to {_MOST:g}, got {numbers}"
            )
        if len(self.gb_per_s) != len(RUN_BYTES):
            raise HaloxError(
                f"expected {len(RUN_BYTES)} bandwidths, for runs of {RUN_BYTES} bytes, got {self.gb_per_s}"
            )
        is_ascending = list(self.gb_per_s) == sorted(self.gb_per_s)
        if self.gb_per_s[0] < _LEAST_GB_PER_S or not is_ascending:
            raise HaloxError(
                f"bandwidths must be above 0 and not fall with longer runs, got {self.gb_per_s}"
            )

    def us(self, nbytes: int, run_bytes: int, messages: int = 1) -> float:
        """Return the microseconds of an exchange of ``messages`` messages of ``nbytes`` bytes in all."""
        per_byte = sum(
            weight / (speed * _B_PER_US)
            for weight, speed in zip(run_weights(run_bytes), self.gb_per_s, strict=True)
        )
        return self.latency_us + max(messages - 1, 0) * self.message_us + nbytes * per_byte


def run_weights(run_bytes: int) -> tuple[float, ...]:
    """Return the weights by which the times per byte at `RUN_BYTES` add up to the time per byte of a run length.

    A run shorter than the first length takes as long as a run of the first length.

    Examples
    --------
    >>> run_weights(8), run_weights(16), run_weights(4)
    ((1.0, 0.0, 0.0, 0.0), (0.5, 0.5, 0.0, 0.0), (2.0, 0.0, 0.0, 0.0))
    """
    weights = [0.0] * len(RUN_BYTES)
    run = max(run_bytes, 1)
    if run <= RUN_BYTES[0]:
        weights[0] = RUN_BYTES[0] / run
    elif run >= RUN_BYTES[-1]:
        weights[-1] = 1.0
    else:
        upper = next(i for i, length in enumerate(RUN_BYTES) if run < length)
        low, high = math.log2(RUN_BYTES[upper - 1]), math.log2(RUN_BYTES[upper])
        share = (math.log2(run) - low) / (high - low)
        weights[upper - 1], weights[upper] = 1.0 - share, share
    return tuple(weights)
