"""What a plan does, message by message, for people and for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from halox.exchange.selection import Route
from halox.messages import Message


@dataclass(frozen=True)
class Row:
    """One message of a plan.

    Attributes
    ----------
    peer : int
        The other rank.
    direction : {"send", "receive"}
    nbytes : int
        Payload in bytes.
    parts, blocks, block_bytes : int
        Datatypes in the message, contiguous runs in all of them, mean bytes of a run.
    path, way, reason : str
        The path taken, how it goes there, and why.
    """

    peer: int
    direction: str
    nbytes: int
    parts: int
    blocks: int
    block_bytes: int
    path: str
    way: str
    reason: str

    @classmethod
    def of(cls, message: Message, route: Route) -> Row:
        """Describe a message and its route."""
        return cls(
            message.peer,
            message.direction,
            message.nbytes,
            len(message.parts),
            message.block_count,
            message.block_bytes,
            route.path,
            route.way,
            route.reason,
        )


@dataclass(frozen=True)
class Report:
    """All messages of one rank's plan; ``print`` it, or take ``rows`` or ``as_dict()``."""

    rank: int
    operation: str
    arrays: tuple[str, ...]
    rows: tuple[Row, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """Return a table with a line a message."""
        head = ("peer", "way", "bytes", "types", "runs", "run bytes", "path", "why")
        lines = [
            (
                str(row.peer),
                row.direction,
                f"{row.nbytes:,}",
                str(row.parts),
                f"{row.blocks:,}",
                f"{row.block_bytes:,}",
                f"{row.path}/{row.way}",
                row.reason,
            )
            for row in self.rows
        ]
        widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
        left = {1, 6, 7}

        def render(line: tuple[str, ...]) -> str:
            cells = [
                cell.ljust(width) if i in left else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            return "  ".join(cells).rstrip()

        title = f"rank {self.rank}: {self.operation} of {', '.join(self.arrays) or 'nothing'}"
        body = [render(head), *map(render, lines)] if lines else ["no messages: no neighbour"]
        return "\n".join([title, *body])
