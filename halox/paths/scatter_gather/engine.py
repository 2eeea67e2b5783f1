"""The interface of engines, which move messages without packing.

An engine is hardware, or the Linux kernel, that walks a list of blocks without help. A *key* identifies a list for the
engine: the blocks of one window of a message. Making a key may be expensive, mapping it to blocks is cheaper, and using
it is cheap. After Suresh et al. 2022, section IV. The life of a transfer::

    region = engine.register(address, nbytes)                    once per piece of memory
    key = engine.make_key()                                      in advance, into a pool
    engine.map(key, window)                                      once per layout, address and chunk size
    remote = engine.export(key)                                  sent to the peer, once
    transfer = engine.transfer("put", key, theirs, peer)         by the rank that moves the window
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
"""Bits of the number that a put may pass to the receiver, as in InfiniBand."""


@dataclass(frozen=True)
class Limits:
    """Limits of an engine's keys; each is a maximum unless its comment says otherwise."""

    entries: int  # of a key
    repeats: int = 1  # blocks of one length at one distance that a single entry describes
    stride_bytes: int = 1 << 62  # bytes of that distance
    key_bytes: int = 1 << 30  # bytes of a window
    keys: int = 1 << 16  # at a time; a message with more windows is moved in rounds
    keys_per_list: int = 1 << 16  # of one end of a message, so that other messages find keys, too
    pool: int = 64  # keys made at a time, in advance
    # Smallest number of windows of a long message, as long as each keeps `window_bytes`.
    windows: int = 1
    window_bytes: int = 1 << 16


class RegisteredRegion(NamedTuple):
    """Registered memory of this rank.

    ``lkey`` identifies the memory in entries of local keys, ``rkey`` in requests of peers; 0 for engines that need no
    such number. Each registration in a process has a different ``generation``, even at the same addresses.
    """

    address: int
    nbytes: int
    generation: int
    lkey: int = 0
    rkey: int = 0
    handle: Any = None


class Key:
    """A list of blocks that an engine walks; engines derive their key classes from it."""

    window: Window | None = None
    """The blocks to which the key is mapped."""


@dataclass(frozen=True)
class RemoteKey:
    """A key of another rank, for requests to that rank; can be pickled.

    It stays valid when its owner maps the key to other blocks.
    """

    rkey: int = 0  # identifies the memory in requests
    nbytes: int = 0
    blocks: Any = None  # description of the blocks, if the engine needs it at the opposite end


Transfer: TypeAlias = Callable[..., None]
"""Begins to move one window of a message between a key of this rank and a key of a peer, after all earlier windows.

Some engines take an argument. An engine between nodes may be given an immediate of `IMMEDIATE_BITS` bits; the peer
receives it when the bytes are in place. An engine that works in streams is given the stream.
"""


class Engine(ABC):
    """Mover of windows between this rank and its peers; one per context, over the ranks of a communicator."""

    name: ClassVar[str]  # also of the protocol, as in ``path="scatter_gather/process_vm"``
    limits: Limits
    needs_registration = True
    """Whether keys refer to registered memory; otherwise the engine can access any memory of a rank by its address."""

    def moved(self, remote: RemoteKey, shifts: Sequence[int]) -> RemoteKey:
        """Return a peer's key for other arrays of the same layouts, each shifted by some bytes from the known array.

        Only for engines without registration, whose keys consist of addresses.
        """
        raise NotImplementedError

    def register(
        self, address: int, nbytes: int, generation: int, device: int | None = None
    ) -> RegisteredRegion:
        """Register memory of this rank, of the host or of a GPU."""
        return RegisteredRegion(address, nbytes, generation)

    def deregister(self, region: RegisteredRegion) -> None:  # noqa: B027 - most keep nothing
        """End a registration, when no mapped key refers to it any longer."""

    def make_key(self) -> Key:
        """Make a key; errors of the engine become `PathError`."""
        return Key()

    def destroy_key(self, key: Key) -> None:  # noqa: B027 - most keep nothing
        """Destroy a key that is not in use."""

    def map(self, key: Key, window: Window) -> None:
        """Map a key to the blocks of a window, whose regions are registered; no transfer may be using the key."""
        key.window = window

    @abstractmethod
    def export(self, key: Key) -> RemoteKey:
        """Return the key in the form for peers."""

    @abstractmethod
    def transfer(self, direction: Direction, key: Key, remote: RemoteKey, peer: int) -> Transfer:
        """Prepare a window's transfer: "put" from this rank to the peer, "get" from the peer to this rank.

        A transfer moves as many bytes as the key's window has when the transfer is posted.
        """

    def complete(self) -> None:  # noqa: B027 - most have already moved all, or ordered it by a stream
        """Wait until everything posted has been moved, at most for ``HALOX_TIMEOUT``.

        Raises `PathError` if a transfer has failed: the text names the peer and the reason.
        """
