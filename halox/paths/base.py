"""What every data path offers to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from halox.paths.messages import Message, Part

Operation = Literal["copy", "add"]


@dataclass(frozen=True)
class Job:
    """The messages of one plan that go one path, with the arrays they name.

    Attributes
    ----------
    arrays : sequence of HostArray or Described
        The plan's arrays, borrowed: on the host or on this rank's GPU.
    sends, receives : tuple of Message
        Messages of this path, in the order of (peer, tag).
    operation : {"copy", "add"}
        Received values replace the target's; or are added to them, and what was sent is set to zero.
    """

    arrays: Sequence[Any]
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    operation: Operation = "copy"

    @property
    def cleared(self) -> tuple[Part, ...]:
        """What is set to zero as soon as it has been sent."""
        if self.operation == "copy":
            return ()
        return tuple(part for message in self.sends for part in message.parts)


class Channel:
    """All messages of one plan that go one path.

    Notes
    -----
    `start` may return before anything has moved; the parts sent must not be written, and those received must not
    be touched, until `finish` returns (on a GPU: until what `finish` put on the stream has run). A plan starts all
    its channels before it finishes any, and every rank finishes its channels in the same order of paths.

    A channel ends in two steps: each rank closes it when it likes, and it is freed when all have closed it.

    Attributes
    ----------
    needs_host : bool
        Whether the host takes part in an exchange, beyond launching kernels.
    is_movable : bool
        Whether the channel can work on other arrays of the same layout, by `views` and `bind`.
    has_ended : bool
        Whether nothing that this rank has begun is under way any more. Asked once it is closed.
    has_failed : bool
        Whether an exchange has failed of which the caller may not have been told. Asked once it is closed.
    """

    needs_host = True
    is_movable = False
    has_ended = True
    has_failed = False

    def check(self) -> None:
        """Raise if an exchange cannot begin as things are; nothing has begun yet."""

    def start(self) -> None:
        """Begin one exchange: send what this rank has to send."""

    def start_at_once(self) -> None:
        """Begin one exchange that `finish` ends without other work in between."""
        self.start()

    def finish(self) -> None:
        """End it: everything received is in place."""

    def views(self, memories: Sequence[memoryview]) -> object:
        """Return views of other arrays of the same layout, for `bind`; local, of a movable channel alone."""

    def bind(self, views: Any) -> None:
        """Work on the arrays of some views from the next exchange on; local, of a movable channel alone."""

    def close(self) -> None:
        """End it, and give back what no other rank reaches; local."""

    def free(self) -> None:
        """Give back what other ranks reached, when all have closed it; local."""
