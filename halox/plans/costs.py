"""Cost constants of all protocols: the shipped constants of every path, or constants measured by ``halox tune``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from halox.errors import HaloxError
from halox.paths import PATHS
from halox.paths.base import Candidate
from halox.paths.costs import RUN_BYTES, ProtocolCost

_SHARED = ", shared GPU"


@dataclass(frozen=True)
class Costs:
    """Cost constants of all protocols: shipped with halox, or measured on a machine.

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

    protocols: Mapping[str, ProtocolCost]  # by `protocol_name`
    origin: str  # source of the constants, as text for people

    @classmethod
    def default(cls) -> Costs:
        """Return the shipped constants of all registered paths."""
        protocols = {}
        for path in PATHS.values():
            for protocol in path.protocols:
                for cost, shared in ((protocol.cost, False), (protocol.shared_gpu_cost, True)):
                    if cost is not None:
                        protocols[protocol_name(path.name, protocol.name, shared)] = cost
        return cls(protocols, "shipped constants")

    def knows(self, path: str, protocol: str) -> bool:
        """Whether a protocol has a cost model; protocols of NumPy arrays have no model."""
        return protocol_name(path, protocol) in self.protocols

    def predict(
        self,
        path: str,
        protocol: str,
        nbytes: int,
        block_bytes: int,
        messages: int = 1,
        shared_gpu: bool = False,
    ) -> float:
        """Return the microseconds that an exchange is expected to take.

        All messages of the exchange together carry ``nbytes`` in one direction. ``block_bytes`` is the length of their
        blocks, at the end with the shorter blocks. ``shared_gpu`` says that another rank of the job uses the GPU of
        either end, too. Raises a `HaloxError` if the protocol has no model; see `knows`.
        """
        name, known = protocol_name(path, protocol), self.protocols
        cost = known.get(protocol_name(path, protocol, shared_gpu), known.get(name))
        if cost is None:
            raise HaloxError(f"there is no cost model of {name!r}; known: {sorted(known)}")
        return cost.us(nbytes, block_bytes, messages)

    def best(
        self,
        candidates: Sequence[Candidate],
        nbytes: int,
        block_bytes: int,
        messages: int = 1,
        shared_gpu: bool = False,
    ) -> Candidate:
        """Return the candidate with the shortest expected time; there must be at least one candidate.

        Preferred candidates are compared first, if there are any. A candidate without a model is taken only if no
        candidate has a model; then it is the first one. Between equal times the first name in alphabetical order wins.
        """

        def rank(candidate: Candidate) -> tuple[float, str, str]:
            path, protocol = candidate.path, candidate.protocol
            us = self.predict(path, protocol, nbytes, block_bytes, messages, shared_gpu)
            return us, path, protocol

        candidates = [candidate for candidate in candidates if candidate.preferred] or candidates
        known = [
            candidate for candidate in candidates if self.knows(candidate.path, candidate.protocol)
        ]
        return min(known, key=rank) if known else candidates[0]

    def updated(self, protocols: Mapping[str, ProtocolCost], origin: str) -> Costs:
        """Return a copy of these constants, with some protocols replaced."""
        return replace(self, protocols={**self.protocols, **protocols}, origin=origin)

    def to_dict(self) -> dict[str, object]:
        """Return plain values, ready for JSON."""
        protocols = {name: asdict(cost) for name, cost in self.protocols.items()}
        return {"origin": self.origin, "run_bytes": list(RUN_BYTES), "protocols": protocols}

    @classmethod
    def from_dict(cls, values: Any) -> Costs:
        """Read the result of `to_dict`."""
        try:
            if tuple(values["run_bytes"]) != RUN_BYTES:
                raise HaloxError(
                    f"constants are for runs of {values['run_bytes']} bytes, not {RUN_BYTES}"
                )
            protocols = {}
            for name, entry in values["protocols"].items():
                numbers = entry["latency_us"], entry["message_us"], tuple(entry["gb_per_s"])
                protocols[str(name)] = ProtocolCost(*numbers)
            return cls(protocols, str(values["origin"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise HaloxError(f"this is not a table of path constants: {error!r}") from error


def protocol_name(path: str, protocol: str, shared_gpu: bool = False) -> str:
    """Return the name of a protocol in a table of constants.

    Examples
    --------
    >>> protocol_name("ipc", "staging"), protocol_name("ipc", "staging", shared_gpu=True)
    ('ipc/staging', 'ipc/staging, shared GPU')
    """
    return f"{path}/{protocol}{_SHARED if shared_gpu else ''}"
