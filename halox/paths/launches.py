"""Launches that pack, unpack and copy parts of messages on a GPU.

They serve a plan's arrays, and through shifted addresses other arrays of the same layouts (`MovableLaunches`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from halox.errors import StateError
from halox.paths.base import Channel, Job
from halox.paths.messages import Message, Part

if TYPE_CHECKING:
    from halox.packing.device_packer import Launchable
    from halox.runtime.gpu.marks import Mark

WORD = 16
"""Bytes of the longest word: a launch can be shifted to all addresses that differ by a multiple of it."""

Item: TypeAlias = "tuple[Any, ...]"
"""A part, followed by further inputs of its launches, such as the address of its packed bytes."""

Make: TypeAlias = "Callable[[Sequence[Item]], Sequence[Launchable]]"
"""Returns one launch per stage for some items, in which an endpoint replaces each part."""

Call: TypeAlias = "tuple[Callable[[int, int, int], None], int, int]"
"""A launch function of a stream's address and two shifts (of the addresses read and written), and these shifts."""

View: TypeAlias = "Sequence[Sequence[Call]]"
"""Calls to make, by stage."""


class MovableLaunches:
    """Launches over the arrays of a job, or over other arrays of the same layouts at other addresses.

    For the job's arrays there are joint launches of all parts. For other arrays there are launches of each array's
    parts, with shifted addresses. The choice of words depends on the remainder of an address modulo `WORD`. So these
    launches are made once for each remainder, at the first address with this remainder, and cached. A new array then
    needs no new table, and a captured launch never reads a table that changes later.

    ``make`` is called with all items, and with the items of one array; it returns equally many stages each time.
    ``joint`` replaces the result of ``make`` for all items. ``reads`` and ``writes`` say whether the launches read or
    write at the addresses of the arrays. `stages` holds the calls to make until the next `bind`.
    """

    def __init__(
        self,
        job: Job,
        items: Sequence[Item],
        make: Make,
        *,
        reads: bool = False,
        writes: bool = False,
        joint: Launchable | None = None,
    ) -> None:
        self._job, self._items, self._make = job, items, make
        self._reads, self._writes = reads, writes
        self._home = [array.pointer for array in job.arrays]
        self._numbers = sorted({part.array for part, *_ in items})
        launches: Sequence[Launchable] = (
            [joint]
            if joint is not None
            else make([(job.endpoint(part), *others) for part, *others in items])
        )
        self.stages: View = [[(_direct(launch), 0, 0)] for launch in launches]
        self._joint = self.stages
        self._joint_launches = launches  # own the memory that the functions in `stages` read
        # By array and remainder of its address: the first address with this remainder, and the launches for it.
        self._by_array: dict[tuple[int, int], tuple[int, Sequence[Launchable]]] = {}
        if len(self._numbers) == 1 and joint is None:
            (only,) = self._numbers
            self._by_array[only, self._home[only] % WORD] = self._home[only], launches

    def view(self, pointers: Sequence[int]) -> View:
        """Return the calls for arrays at these addresses; local.

        `StateError` if new launches must be made and the current stream is being captured.
        """
        if all(pointers[number] == self._home[number] for number in self._numbers):
            return self._joint
        return self._moved(pointers)

    def _moved(self, pointers: Sequence[int]) -> View:
        """Return the calls array by array."""
        stages: list[list[Call]] = [[] for _ in self._joint]
        for number in self._numbers:
            pointer = pointers[number]
            cached = self._by_array.get((number, pointer % WORD))
            at, launches = cached or self._make_for_array(number, pointer)
            shift = (pointer - at) % (1 << 64)
            source, target = shift if self._reads else 0, shift if self._writes else 0
            for stage, launch in zip(stages, launches, strict=True):
                stage.append((_direct(launch), source, target))
        return stages

    def bind(self, view: View) -> None:
        """Set `stages` to a view."""
        self.stages = view

    def launch(self, stream: int) -> None:
        """Enqueue all stages on a stream, given by its address."""
        for stage in self.stages:
            for launch, source, target in stage:
                launch(stream, source, target)

    def _make_for_array(self, number: int, pointer: int) -> tuple[int, Sequence[Launchable]]:
        """Make the launches of one array's parts at an address, and cache them."""
        check_no_capture()
        array = replace(self._job.arrays[number], pointer=pointer)
        launches = self._make(
            [
                ((array, part.datatype, part.count), *others)
                for part, *others in self._items
                if part.array == number
            ]
        )
        self._by_array[number, pointer % WORD] = pointer, launches
        return pointer, launches


class PackingWithCopies(MovableLaunches):
    """One launch that packs parts, and copies others within the rank, from the first part of each pair to the second.

    For other arrays there are two separate launches: both ends of a copy move with the arrays, but only one end of a
    packing.
    """

    def __init__(
        self,
        job: Job,
        items: Sequence[Item],
        pairs: Sequence[tuple[Part, Part]],
        device: int,
        mark: Mark | None = None,
    ) -> None:
        from halox.packing.device import launch_pack

        moves = [(job.endpoint(part), address) for part, address in items]
        both = [(job.endpoint(source), job.endpoint(target)) for source, target in pairs]
        joint = launch_pack(moves, device, mark, both)
        super().__init__(
            job, items, lambda some: [launch_pack(some, device, mark)], reads=True, joint=joint
        )
        self._pairs, self._device = pairs, device
        self._copied = sorted({source.array for source, _ in pairs})
        self._copies: MovableLaunches | None = None

    def view(self, pointers: Sequence[int]) -> View:
        """Return the calls for arrays at these addresses; see :meth:`MovableLaunches.view`."""
        if all(pointers[number] == self._home[number] for number in self._copied):
            stages = super().view(pointers)
            if stages is self._joint:
                return stages
        if self._copies is None:
            check_no_capture()
            self._copies, _ = copying(self._job, self._pairs, self._device)
        return [[*self._moved(pointers)[0], *self._copies.view(pointers)[0]]]


def _direct(launch: Launchable) -> Callable[[int, int, int], None]:
    """Return the function that launches on a stream given by its address, without the Python layers around it."""
    launch_at: Callable[[int, int, int], None] = getattr(launch, "at", None) or launch.launch
    return launch_at


def repeated(call: Call, stream: int) -> Callable[[], object]:
    """Return a function that repeats a call on a stream; the last launch of the call must have had the same shifts."""
    from halox.runtime.gpu.launch import PreparedLaunch

    launch, source, target = call
    owner = getattr(launch, "__self__", None)
    if isinstance(owner, PreparedLaunch):
        return owner.ready(stream)  # its addresses are already set
    return partial(launch, stream, source, target)


def check_no_capture() -> None:
    """Raise `StateError` if the current stream is being captured, so that launches cannot be made."""
    from halox.runtime.gpu.streams import is_capturing

    if is_capturing():
        raise StateError(
            "the current stream is being captured, and these arrays are the first of their layout at such addresses, "
            "which takes new tables; exchange them once before the capture"
        )


class MovableChannel(Channel):
    """A channel on a GPU; all its launches, listed in `_movable`, can move to other arrays."""

    is_movable = True
    _movable: Sequence[MovableLaunches] = ()

    def views(self, memories: Sequence[int]) -> Sequence[View]:
        """Return the launches for arrays at other addresses."""
        return [launches.view(memories) for launches in self._movable]

    def bind(self, views: Sequence[View]) -> None:
        """Use the launches for the arrays of these views."""
        for launches, view in zip(self._movable, views, strict=True):
            launches.bind(view)


def items_of(messages: Sequence[Message], addresses: Sequence[Iterable[int]]) -> list[Item]:
    """Pair each part of some messages with the address of its packed bytes."""
    return [
        (part, address)
        for message, of_parts in zip(messages, addresses, strict=True)
        for part, address in zip(message.parts, of_parts, strict=True)
    ]


def packed_items(messages: Sequence[Message], starts: Sequence[int]) -> list[Item]:
    """Pair each part of some messages with its address in the packed messages, which begin at ``starts``."""
    return items_of(
        messages,
        [
            [start + offset for offset in message.offsets]
            for message, start in zip(messages, starts, strict=True)
        ],
    )


def packing(
    job: Job, items: Sequence[Item], device: int, mark: Mark | None = None
) -> MovableLaunches:
    """Return the launch that packs parts to their paired addresses, and sets a mark as it starts."""
    from halox.packing.device import launch_pack

    return MovableLaunches(job, items, lambda moves: [launch_pack(moves, device, mark)], reads=True)


def unpacking(
    job: Job, items: Sequence[Item], device: int, mark: Mark | None = None
) -> MovableLaunches:
    """Return the launch that unpacks or adds parts from their paired addresses; sets a mark like `packing`."""
    from halox.packing.device import launch_add, launch_unpack

    unpack = launch_add if job.operation == "add" else launch_unpack
    return MovableLaunches(job, items, lambda moves: [unpack(moves, device, mark)], writes=True)


def fragmented(
    job: Job,
    items: Sequence[Item],
    messages: Sequence[Message],
    ends: Sequence[tuple[int, ...]],
    fragments: int,
    device: int,
    *,
    unpack: bool,
) -> MovableLaunches:
    """Return launches whose stages are the fragments of some messages; ``ends`` has each message's fragment ends."""
    from halox.packing.device import fragment_launches

    shares = [
        [min(max(end - offset, 0), part.nbytes) for end in at + at[-1:] * (fragments - len(at))]
        for message, at in zip(messages, ends, strict=True)
        for part, offset in zip(message.parts, message.offsets, strict=True)
    ]
    cut = [(*item, share) for item, share in zip(items, shares, strict=True)]
    make = partial(fragment_launches, fragments=fragments, device=device, unpack=unpack)
    return MovableLaunches(job, cut, make, reads=not unpack, writes=unpack)


def clearing_of(job: Job, device: int) -> list[MovableLaunches]:
    """Return the launch that clears the parts that an accumulation has sent; an empty list for other operations."""
    from halox.packing.device import launch_zeros

    if not job.cleared:
        return []
    items = [(part,) for part in job.cleared]

    def make(endpoints: Sequence[Item]) -> Sequence[Launchable]:
        return [launch_zeros([endpoint for (endpoint,) in endpoints], device)]

    return [MovableLaunches(job, items, make, writes=True)]


def is_movable_copy(pair: tuple[Part, Part]) -> bool:
    """Whether a copy within a rank can move to other arrays."""
    source, target = pair
    both = source.strided is not None and target.strided is not None
    return both and source.array == target.array


def copying(
    job: Job, pairs: Sequence[tuple[Part, Part]], device: int
) -> tuple[MovableLaunches, bool]:
    """Return the launches of a rank's messages to itself, and whether they can move to other arrays."""
    from halox.packing.device import launch_between

    is_movable = all(map(is_movable_copy, pairs))

    def make(endpoints: Sequence[Item]) -> Sequence[Launchable]:
        if is_movable:
            both = [(end, (end[0], target.datatype, target.count)) for end, target in endpoints]
        else:
            both = [(job.endpoint(a), job.endpoint(b)) for a, b in pairs]
        return [launch_between(both, job.operation, device)]

    return MovableLaunches(job, pairs, make, reads=True, writes=True), is_movable
