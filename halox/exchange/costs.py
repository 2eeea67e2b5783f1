"""What a message costs on each path: the model by which paths are chosen, and its constants.

The time of one exchange that carries ``messages`` messages of ``nbytes`` bytes in all, in runs of b bytes, is::

    latency_us + (messages - 1) * message_us + nbytes / bandwidth(b)

Launches, flags and waits are in the latency, so that messages which share an exchange pay it once. The bandwidth is
that of the whole way, packing and unpacking included. It is known at a few lengths of runs; between them the time
per byte is a straight line over the logarithm of the length.

Both ends of a message ask with the same numbers (the shorter of their two run lengths, and whether either of them
shares its GPU) and hold the same constants (`halox.exchange.calibration.agreed_costs`), so that they get the same
answer. NumPy arrays have no model: their ways follow the fixed rules of `halox.exchange.selection`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from halox.errors import HaloxError

RUN_BYTES = (8, 32, 128, 1024)
"""Lengths of runs at which bandwidths are given; longer runs are as fast as the last."""

_B_PER_US = 1e3
"""Bytes a microsecond in a GB/s."""


_MOST = 1e12
_LEAST_GB_PER_S = 1e-9
"""Bounds of sensible constants, within which no prediction overflows."""


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 <= value <= _MOST


@dataclass(frozen=True)
class WayCost:
    """The constants of one way.

    Attributes
    ----------
    latency_us : float
        Time of an exchange of one message without bytes.
    message_us : float
        What each further message of the same exchange adds.
    gb_per_s : tuple of float
        Payload bandwidth for runs of `RUN_BYTES`, never less for longer runs; 1 GB is 1e9 bytes.
    """

    latency_us: float
    message_us: float
    gb_per_s: tuple[float, ...]

    def __post_init__(self) -> None:
        """Check the numbers, which may come from a file.

        Raises
        ------
        HaloxError
            If one is not a number, is negative or beyond all bounds, or bandwidths are not one a run length in
            ascending order.
        """
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


class Choosable(Protocol):
    """A path and way that a message can take."""

    @property
    def path(self) -> str:
        """Name of the path."""

    @property
    def way(self) -> str:
        """How the message goes there."""


Chosen = TypeVar("Chosen", bound=Choosable)


# The shipped constants: H200-class GPUs, all pairs linked by NVLink. `halox tune` replaces them on other machines.
#                        latency  message    GB/s in runs of 8 B, 32 B, 128 B, 1 KiB and more
DEFAULT_WAYS: Mapping[str, WayCost] = {
    # One kernel on each side; data and epoch in one store, so no flag, but up to twice the bytes.
    "peer/ll": WayCost(3.9, 0.2, (200.0, 250.0, 290.0, 305.0)),
    # Packed into the peer's memory, a flag a chunk, unpacked there.
    "peer/staging": WayCost(4.8, 0.3, (160.0, 225.0, 290.0, 315.0)),
    # Stored into the halo itself, once its owner has said that it may be: short runs are short remote stores.
    "peer/direct": WayCost(7.4, 0.3, (73.0, 180.0, 330.0, 352.0)),
    # Kernels and copies ordered by the host, events and host flags.
    "ipc/staging": WayCost(19.0, 4.0, (165.0, 220.0, 280.0, 320.0)),
    "ipc/into": WayCost(24.0, 4.0, (120.0, 220.0, 300.0, 315.0)),
    "ipc/from": WayCost(24.0, 4.0, (120.0, 220.0, 300.0, 315.0)),
    # Through host memory: out over one link, in over the other.
    "staged/shared": WayCost(27.0, 0.5, (22.0, 24.0, 25.0, 25.0)),
    "staged/mpi": WayCost(40.0, 2.0, (4.5, 5.0, 5.0, 5.0)),
    "cuda_aware/mpi": WayCost(35.0, 3.0, (93.0, 160.0, 230.0, 250.0)),
    "local/copy": WayCost(7.0, 0.0, (250.0, 800.0, 1500.0, 1900.0)),
    # Processes that share a GPU take turns of it, a quarter of a millisecond each.
    "ipc/staging, shared GPU": WayCost(260.0, 4.0, (100.0, 250.0, 500.0, 600.0)),
    "ipc/into, shared GPU": WayCost(390.0, 4.0, (120.0, 300.0, 700.0, 900.0)),
    "ipc/from, shared GPU": WayCost(390.0, 4.0, (120.0, 300.0, 700.0, 900.0)),
    "staged/shared, shared GPU": WayCost(450.0, 0.5, (11.0, 12.0, 13.0, 13.0)),
    "staged/mpi, shared GPU": WayCost(470.0, 2.0, (3.7, 4.0, 4.0, 4.0)),
    "cuda_aware/mpi, shared GPU": WayCost(500.0, 3.0, (60.0, 120.0, 200.0, 220.0)),
}


@dataclass(frozen=True)
class Costs:
    """The constants of all ways: the shipped ones, or those measured on a machine.

    Attributes
    ----------
    ways : mapping of str to WayCost
        By `way_name`.
    origin : str
        Where they come from, for people.

    Notes
    -----
    Not collective; touches no device.

    Examples
    --------
    >>> costs = Costs.default()
    >>> costs.predict("peer", "staging", 0, 8)
    4.8
    >>> costs.predict("peer", "ll", 1 << 12, 8) < costs.predict("peer", "staging", 1 << 12, 8)
    True
    >>> Costs.from_dict(costs.to_dict()) == costs
    True
    """

    ways: Mapping[str, WayCost]
    origin: str

    @classmethod
    def default(cls) -> Costs:
        """Return the shipped constants."""
        return cls(dict(DEFAULT_WAYS), "shipped constants")

    def knows(self, path: str, way: str) -> bool:
        """Whether there is a model of a way; there is none of those of NumPy arrays."""
        return way_name(path, way) in self.ways

    def predict(
        self,
        path: str,
        way: str,
        nbytes: int,
        block_bytes: int,
        messages: int = 1,
        shared_gpu: bool = False,
    ) -> float:
        """Return the microseconds that an exchange is expected to take.

        Parameters
        ----------
        path, way : str
            The way all its messages take.
        nbytes : int
            Payload of all of them together, one way.
        block_bytes : int
            Mean bytes of a run, on the end where runs are shorter.
        messages : int
            How many messages share the exchange.
        shared_gpu : bool
            Whether either end's GPU is used by another rank of the job too.

        Raises
        ------
        HaloxError
            If there is no model of the way; see `knows`.
        """
        name = way_name(path, way)
        cost = self.ways.get(way_name(path, way, shared_gpu), self.ways.get(name))
        if cost is None:
            raise HaloxError(f"there is no cost model of {name!r}; known: {sorted(self.ways)}")
        return cost.us(nbytes, block_bytes, messages)

    def best(
        self,
        options: Sequence[Chosen],
        nbytes: int,
        block_bytes: int,
        messages: int = 1,
        shared_gpu: bool = False,
    ) -> Chosen:
        """Return the option that is expected to take least.

        Parameters
        ----------
        options : sequence of objects with ``path`` and ``way``
            At least one. Those without a model are taken only if none has one; then the first.
        nbytes, block_bytes, messages, shared_gpu
            As of `predict`.

        Notes
        -----
        The order of the options does not matter where their times are equal: the first by name is taken.
        """
        known = [option for option in options if self.knows(option.path, option.way)]
        if not known:
            return options[0]
        return min(
            known,
            key=lambda o: (
                self.predict(o.path, o.way, nbytes, block_bytes, messages, shared_gpu),
                o.path,
                o.way,
            ),
        )

    def updated(self, ways: Mapping[str, WayCost], origin: str) -> Costs:
        """Return these constants with some ways' replaced."""
        return replace(self, ways={**self.ways, **ways}, origin=origin)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {
            "origin": self.origin,
            "run_bytes": list(RUN_BYTES),
            "ways": {
                name: {
                    "latency_us": cost.latency_us,
                    "message_us": cost.message_us,
                    "gb_per_s": list(cost.gb_per_s),
                }
                for name, cost in self.ways.items()
            },
        }

    @classmethod
    def from_dict(cls, found: Any) -> Costs:
        """Read what `to_dict` has returned.

        Raises
        ------
        HaloxError
            If it is anything else, or a constant is no sensible number.
        """
        try:
            if tuple(found["run_bytes"]) != RUN_BYTES:
                raise HaloxError(
                    f"constants are for runs of {found['run_bytes']} bytes, not {RUN_BYTES}"
                )
            ways = {
                str(name): WayCost(one["latency_us"], one["message_us"], tuple(one["gb_per_s"]))
                for name, one in found["ways"].items()
            }
            return cls(ways, str(found["origin"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise HaloxError(f"this is no table of path constants: {error!r}") from error


def way_name(path: str, way: str, shared_gpu: bool = False) -> str:
    """Return the name of a way in a table of constants.

    Examples
    --------
    >>> way_name("ipc", "into"), way_name("ipc", "into", shared_gpu=True)
    ('ipc/into', 'ipc/into, shared GPU')
    """
    return f"{path}/{way}, shared GPU" if shared_gpu else f"{path}/{way}"


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
