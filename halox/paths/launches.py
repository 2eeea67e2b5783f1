"""Launches that pack and unpack the parts of messages on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from halox.paths.base import Job
from halox.paths.fragments import shares_of
from halox.paths.messages import Message

if TYPE_CHECKING:
    from halox.packing.device import Launches, Move
    from halox.packing.device_packer import Launchable


def moves_of(
    job: Job, messages: Sequence[Message], addresses: Sequence[Iterable[int]]
) -> list[Move]:
    """Pair each part of some messages with the address of its packed bytes."""
    return [
        (job.endpoint(part), address)
        for message, of_parts in zip(messages, addresses, strict=True)
        for part, address in zip(message.parts, of_parts, strict=True)
    ]


def fragmented(
    moves: Sequence[Move],
    messages: Sequence[Message],
    ends: Sequence[tuple[int, ...]],
    fragments: int,
    device: int,
    *,
    unpack: bool,
) -> list[Launches]:
    """Return the launches of each fragment of some messages, which end where ``ends`` says."""
    from halox.packing.device import fragment_launches

    shares = shares_of(messages, ends, fragments)
    cut = [(*move, share) for move, share in zip(moves, shares, strict=True)]
    return fragment_launches(cut, fragments, device, unpack=unpack)


def clearing_of(job: Job, device: int) -> list[Launchable]:
    """Return the launch that sets to zero what has been sent, in accumulations."""
    from halox.packing.device import Zeroing

    return [Zeroing([job.endpoint(part) for part in job.cleared], device)] if job.cleared else []
