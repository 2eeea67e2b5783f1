"""The engine of a transfer without packing: registers memory, maps windows of blocks to keys, moves them.

An engine is a piece of hardware, or the kernel, that walks a list of blocks by itself. A *key* names such a list, the
blocks of one window of a message; making one may be expensive, mapping it to blocks is cheaper, using it is cheap.
After Suresh et al. 2022, section IV. The life of a transfer::

    region = engine.register(address, nbytes)                    once per piece of memory
    key = engine.make_key()                                      in advance, into a pool
    engine.map(key, window)                                      once per layout, address and chunk size
    remote = engine.export(key)                                  sent to the peer, once
    transfer = engine.transfer("put", key, theirs, peer)         by the rank that will move the window
    transfer(...)                                                in every exchange
    engine.complete()                                            the bytes are in place
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

from halox.paths.scatter_gather.windows import Window

Direction = Literal["put", "get"]

IMMEDIATE_BITS = 32
"""Bits of the number that a put may hand to the receiver, as in InfiniBand."""


@dataclass(frozen=True)
class Limits:
    """Limits of an engine's keys: the most of each, where nothing else is said."""

    entries: int  # of a key
    repeats: int = 1  # blocks of one length at one distance that a single entry describes
    stride_bytes: int = 1 << 62  # bytes of that distance
    key_bytes: int = 1 << 30  # bytes of a window
    keys: int = 1 << 16  # at a time; a message of more windows is moved in rounds
    keys_per_list: int = 1 << 16  # of one end of a message, so that some are left for others
    pool: int = 64  # keys made at a time, in advance
    # Into which a long message is divided at least, as far as each keeps `window_bytes`.
    windows: int = 1
    window_bytes: int = 1 << 16


class Region(NamedTuple):
    """Registered memory of this rank.

    ``lkey`` stands for it in entries of local keys, ``rkey`` in requests of peers; 0 for engines that need none. No two
    registrations of a process have the same ``generation``, even of the same addresses.
    """

    address: int
    nbytes: int
    generation: int
    lkey: int = 0
    rkey: int = 0
    handle: Any = None


class Key:
    """A list of blocks that an engine walks; engines derive their own."""

    window: Window | None = None
    """The blocks to which it is mapped."""


@dataclass(frozen=True)
class RemoteKey:
    """A key of another rank, for requests to it; can be pickled.

    It means the same after its owner has mapped the key to other blocks.
    """

    rkey: int = 0  # the memory behind it in requests
    nbytes: int = 0
    blocks: Any = None  # their description, where the engine needs it at the other end


Transfer: TypeAlias = Callable[..., None]
"""Begins to move one window of a message, between a key of this rank and one of a peer, after those moved before.

Of engines that reach other nodes it may be given an immediate, of `IMMEDIATE_BITS` bits, for the peer once the bytes
are in place; of those that work in streams it is given the one behind whose work the window is moved.
"""


class Engine(ABC):
    """Mover of windows between this rank and its peers; one a context, over the ranks of a communicator."""

    name: ClassVar[str]  # also of the protocol, as in ``path="scatter_gather/process_vm"``
    limits: Limits
    needs_registration = True
    """Whether keys stand for registered memory; otherwise any memory of a rank can be reached, by its address."""

    def moved(self, remote: RemoteKey, shifts: Sequence[int]) -> RemoteKey:
        """Return a peer's key for other arrays of the same layouts, each some bytes further on than the known one.

        Only of engines that need no registration, whose keys are addresses and no more.
        """
        raise NotImplementedError

    def register(
        self, address: int, nbytes: int, generation: int, device: int | None = None
    ) -> Region:
        """Register memory of this rank, of the host or of a GPU."""
        return Region(address, nbytes, generation)

    def deregister(self, region: Region) -> None:  # noqa: B027 - most keep nothing
        """End a registration, when no mapped key stands on it any more."""

    def make_key(self) -> Key:
        """Make a key; an error of the engine is a `PathError`."""
        return Key()

    def destroy_key(self, key: Key) -> None:  # noqa: B027 - most keep nothing
        """Destroy a key that is not in use."""

    def map(self, key: Key, window: Window) -> None:
        """Let a key stand for the blocks of a window, whose regions are registered; no transfer uses the key now."""
        key.window = window

    @abstractmethod
    def export(self, key: Key) -> RemoteKey:
        """Return the key as peers need it."""

    @abstractmethod
    def transfer(self, direction: Direction, key: Key, remote: RemoteKey, peer: int) -> Transfer:
        """Prepare a window's transfer: "put" from this rank to the peer, "get" from the peer to this rank.

        As many bytes are moved as the key's window has when it is posted.
        """

    def complete(self) -> None:  # noqa: B027 - most have moved it, or ordered it by a stream
        """Wait until everything posted has been moved, at most for ``HALOX_TIMEOUT``.

        Raises `PathError` if a transfer has failed: names the peer and the reason.
        """
