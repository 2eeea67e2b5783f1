"""Report of a plan, message by message, for people and for programs: the result of `Plan.explain`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from halox.paths.base import Key, Route
from halox.paths.messages import Message
from halox.tables import text_table

_HEAD = (
    *("peer", "direction", "bytes", "types", "blocks", "block bytes", "path"),
    *("predicted us", "measured us", "why"),
)


@dataclass(frozen=True)
class Row:
    """One message of a plan.

    Attributes
    ----------
    peer : int
        Rank of the peer.
    direction : {"send", "receive"}
        Direction, seen from this rank.
    nbytes : int
        Payload in bytes.
    parts : int
        Datatypes in the message.
    blocks : int
        Contiguous blocks in all datatypes together.
    block_bytes : int
        Mean length of a block.
    path : str
        Path taken.
    protocol : str
        Its protocol.
    reason : str
        Reason for the choice.
    tag : int
        Distinguishes messages with one peer.
    predicted_us : float or None
        Prediction of the cost model for an exchange of this message alone; None for paths without a model.
    measured_us : float or None
        Time of an exchange of all messages that travel together with this one, in both directions; see `Plan.measure`.
    why_not : mapping of str to str
        For each path that cannot be taken, the reason.
    """

    peer: int
    direction: str
    nbytes: int
    parts: int
    blocks: int
    block_bytes: int
    path: str
    protocol: str
    reason: str
    tag: int = 0
    predicted_us: float | None = None
    measured_us: float | None = None
    why_not: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, message: Message, route: Route) -> Row:
        """Describe a message, its route, and the reasons why other paths cannot be taken."""
        return cls(
            message.peer,
            message.direction,
            message.nbytes,
            len(message.parts),
            message.block_count,
            message.block_bytes,
            route.path,
            route.protocol,
            route.reason,
            message.tag,
            route.predicted_us,
            why_not=dict(route.why_not),
        )

    @property
    def key(self) -> Key:
        """Direction, peer and tag, equal to ``Message.key``."""
        return self.direction, self.peer, self.tag


@dataclass(frozen=True)
class Report:
    """All messages of one rank's plan; ``print`` the report, or use ``rows`` or ``as_dict()``.

    Attributes
    ----------
    rank : int
        Rank of this process.
    operation : {"exchange", "accumulation", "transpose"}
        Operation of the plan.
    arrays : tuple of str
        Descriptions of the arrays.
    rows : tuple of Row
        One for each message.
    notes : tuple of str
        Sentences about loops; see `Plan.overlap`.
    """

    rank: int
    operation: str
    arrays: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """Return everything as plain values, ready for JSON."""
        return asdict(self)

    def measured(self, us: Mapping[Key, float]) -> Report:
        """Return the report with the measured times of some messages filled in."""
        rows = tuple(
            replace(row, measured_us=us.get(row.key, row.measured_us)) for row in self.rows
        )
        return replace(self, rows=rows)

    @property
    def _title(self) -> str:
        return f"rank {self.rank}: {self.operation} of {', '.join(self.arrays) or 'nothing'}"

    def _lines(self) -> list[tuple[str, ...]]:
        return [
            (
                str(row.peer),
                row.direction,
                f"{row.nbytes:,}",
                str(row.parts),
                f"{row.blocks:,}",
                f"{row.block_bytes:,}",
                f"{row.path}/{row.protocol}",
                _us(row.predicted_us),
                _us(row.measured_us),
                row.reason,
            )
            for row in self.rows
        ]

    def __repr__(self) -> str:
        """Return the table, as ``print`` shows it."""
        return str(self)

    def __str__(self) -> str:
        """Return a table with one line per message."""
        lines = self._lines()
        body = text_table([_HEAD, *lines], {1, 6, 9}) if lines else ["no messages: no neighbour"]
        if any(row.measured_us is not None for row in self.rows):
            body.append("measured us: of an exchange of all messages that go one path together")
        return "\n".join([self._title, *body, *self.notes])


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
