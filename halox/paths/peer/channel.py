"""The ``peer`` path: one kernel an exchange, among GPUs that map one another's memory.

The kernel (``paths/peer/kernels/peer.cu`` states its protocol, and why no order of its blocks can deadlock) packs into
the peers' memory, signals there, waits for what the peers send, and unpacks. The host only launches it::

    rank A  ...user's kernels | pack -> B's staging memory, flag | wait for B's flag, unpack | user's kernels...
    rank B  ...user's kernels | pack -> A's staging memory, flag | wait for A's flag, unpack | user's kernels...

A message goes one of three ways. ``ll``: in packets of data and epoch, which need no flag, for small ones.
``staging``: packed, a flag a chunk. ``direct``: straight into the receiver's array, where both sides have long runs
and the array lies in memory that the receiver has exported.

Double buffers. A rank's launch for epoch e + 2 writes the slot of epoch e in its peer's memory. It comes after its
launch for e + 1, which took what the peer sent in its launch for e + 1; and that began when the peer's launch for e
had ended, and with it the last use of the slot. Where nothing comes back from a peer, the launch waits instead until
the peer says that it has begun epoch e + 1.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from halox.errors import ExchangeTimeoutError, HaloxError
from halox.packing.device import Zeroing
from halox.paths.base import Channel, Job
from halox.paths.peer.draft import Draft, Granted
from halox.paths.peer.ends import Tag
from halox.paths.peer.exported import Exported
from halox.runtime.device_arena import DeviceArena
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.launch import PreparedLaunch
from halox.runtime.gpu.pools import SIDE_STREAMS, SideStream
from halox.runtime.gpu.streams import StreamOrder
from halox.runtime.world import World

_MAKING = "the making of a plan"


class PeerChannel(Channel):
    """All messages that one launch moves; made by :func:`make_peer_channel`."""

    needs_host = False

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._world, device = draft.world, draft.device
        cp = cupy()
        self._runtime = cp.cuda.runtime
        self._current_stream = cp.cuda.get_current_stream
        self._order = StreamOrder()
        self._launch, self._launch_aside = draft.prepared()
        assert draft.failure is not None
        self._failure = draft.failure.array.data.cast("I")
        job = draft.job
        self._before, self._after = draft.around()
        cleared = [(job.arrays[p.array], p.datatype, p.count) for p in job.cleared]
        if cleared:
            self._after.append(Zeroing(cleared, device))
        self._side: SideStream | None = SIDE_STREAMS.take(device)
        self._is_aside = False
        self._is_told = False

    def start_at_once(self) -> None:
        """Put the whole exchange on the current stream."""
        self._enter(self._current_stream(), self._launch)

    def start(self) -> None:
        """Put the whole exchange on a stream of its own, after what the current one holds by now."""
        side, runtime = self._side, self._runtime
        assert side is not None
        aside = side.stream.ptr
        runtime.eventRecord(side.before.ptr, self._current_stream().ptr)
        runtime.streamWaitEvent(aside, side.before.ptr)
        self._enter(side.stream, self._launch_aside)
        runtime.eventRecord(side.after.ptr, aside)
        self._is_aside = True

    def finish(self) -> None:
        """Order the current stream after the exchange."""
        if self._is_aside:
            self._is_aside = False
            assert self._side is not None
            self._runtime.streamWaitEvent(self._current_stream().ptr, self._side.after.ptr)

    def _enter(self, stream: Any, launch: PreparedLaunch) -> None:
        if self._failure[0]:
            self._raise_failure()
        pointer = stream.ptr
        if self._order.last is not stream:
            self._order.follow(stream)
        for part in self._before:
            part.launch(pointer)
        launch.launch(pointer)
        for part in self._after:
            part.launch(pointer)

    def _raise_failure(self) -> None:
        if self._failure[0]:
            self._is_told = True
            raise self._failed()

    def _failed(self) -> ExchangeTimeoutError:
        peer = self._draft.peer_of(self._failure[0] - 1)
        return ExchangeTimeoutError(
            f"rank {self._world.rank} has waited for rank {peer} in exchange {self._failure[1]} of a plan for "
            f"{self._world.limit_s:g} s (HALOX_TIMEOUT), on the GPU; what was received in it, and since, is not "
            "valid. A rank has failed, is far behind, or has made another sequence of calls"
        )

    def close(self) -> None:
        """Wait for the last launch; warn if an exchange has failed since the last call.

        The memory stays as it is: the peers' launches may still store into it, and look there for this rank's.
        """
        side, self._side = self._side, None
        assert side is not None
        self._order.synchronize()
        self.has_failed = bool(self._failure[0])
        if self.has_failed and not self._is_told:
            warnings.warn(str(self._failed()), stacklevel=2)
        self._failure.release()
        SIDE_STREAMS.give_back(self._draft.device, side)

    def free(self) -> None:
        """Give the memory back, when the peers' last launches have ended too."""
        self._draft.release()


def make_peer_channel(
    world: World,
    arena: DeviceArena | None,
    job: Job,
    copies: Job,
    ways: Mapping[tuple[str, int, int], str],
    exported: Mapping[Tag, Exported | None],
) -> PeerChannel | None:
    """Make the channel of a plan's messages that go the peer path.

    Parameters
    ----------
    world, arena
        The ranks, and this rank's device memory; None on a rank without a GPU.
    job : Job
        The messages, none on ranks that have none.
    copies : Job
        Messages to this rank itself that may be copied by the same launch.
    ways : mapping
        For each message of the job, by its key: "ll", "staging" or "direct".
    exported : mapping
        For each message sent directly, by (peer, tag), where its receiver's array lies.

    Returns
    -------
    PeerChannel or None
        None on ranks without such messages.

    Raises
    ------
    HaloxError
        On all ranks, if any of them cannot make its part.

    Notes
    -----
    Collective over the world. The GPUs must be idle as far as earlier plans are concerned: their memory is used again.
    """
    draft: Draft | None = None

    def begun() -> None:
        nonlocal draft
        if arena is not None and (job.sends or job.receives):
            draft = Draft(world, arena, job, copies, ways, exported)

    def granted() -> dict[int, Granted]:
        return {} if draft is None else draft.grant(announced)

    def made() -> PeerChannel | None:
        if draft is None:
            return None
        draft.open(answers)
        return PeerChannel(draft)

    try:
        world.guarded(begun, _MAKING)
        peers = [] if draft is None else draft.peers
        announced = world.swap({} if draft is None else draft.announced(), peers, _MAKING)
        answers = world.swap(world.guarded(granted, _MAKING), peers, _MAKING)
        channel: PeerChannel | None = world.guarded(made, _MAKING)
    except HaloxError:
        if draft is not None:
            draft.release()
        raise
    return channel
