"""The cost model of a protocol: the constants by which paths are chosen.

The time of one exchange that carries ``messages`` messages of ``nbytes`` bytes in all, in runs of b bytes, is::

    latency_us + (messages - 1) * message_us + nbytes / bandwidth(b)

Launches, flags and waits are in the latency, so that messages which share an exchange pay it once. The bandwidth is
end to end, packing and unpacking included. It is known at a few lengths of runs; between them the time
per byte is a straight line over the logarithm of the length.

Both ends of a message ask with the same numbers (the shorter of their two run lengths, and whether either of them
shares its GPU) and hold the same constants (`halox.exchange.calibration.agreed_costs`), so that they get the same
answer. NumPy arrays have no model: their protocols follow fixed rules (`halox.paths.host`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from halox.errors import HaloxError

RUN_BYTES = (8, 32, 128, 1024)
"""Lengths of runs at which bandwidths are given; longer runs are as fast as the last."""

_B_PER_US = 1e3
"""Bytes a microsecond in a GB/s."""


_MOST = 1e12
_LEAST_GB_PER_S = 1e-9
"""Bounds of sensible constants, within which no prediction overflows."""


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 <= value <= _MOST


@dataclass(frozen=True)
class ProtocolCost:
    """Constants of one protocol."""

    latency_us: float  # of an exchange of one message without bytes
    message_us: float  # added by each further message of the same exchange
    # Of payload, for runs of `RUN_BYTES`, never less for longer runs; 1 GB is 1e9 bytes.
    gb_per_s: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raise a `HaloxError` unless the numbers, which may come from a file, are sensible and ascending."""
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
    """Return what share of the time per byte at each of `RUN_BYTES` makes that of a run length.

    Below the first length a run costs what the first one does, however short it is.

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
