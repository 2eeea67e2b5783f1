"""The ``mlx5_umr`` engine: network adapters gather and scatter by keys that refer to lists of blocks.

After Suresh et al. 2022, section IV.C-E. A key is an indirect memory key, made once. A work request maps it to the
blocks of a window: to a strided pattern if all blocks are equally far apart, otherwise to a list. A transfer is one
RDMA write from a key of this rank to a key of the peer; offsets in both keys count from 0. The last write of a round
also sends a number to the peer.

The adapter's limits are the limits of rdma-core's work requests (mlx5dv_wr_post(3)). The entries of a key must fit into
the request that maps it. Lengths and distances of a strided pattern have 16 bits; longer values are truncated without
an error.

This code has never run on hardware.
"""

from __future__ import annotations

import socket
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from halox.errors import DeviceError, PathError
from halox.paths.scatter_gather import MLX5_UMR
from halox.paths.scatter_gather.engine import (
    IMMEDIATE_BITS,
    Direction,
    Engine,
    Key,
    Limits,
    RegisteredRegion,
    RemoteKey,
    Transfer,
)
from halox.paths.scatter_gather.windows import Window
from halox.runtime.mlx5 import (
    ACCESS,
    INLINE_BYTES,
    SEND_DEPTH,
    SEND_INLINE,
    SEND_SIGNALED,
    WC_SUCCESS,
    Adapter,
    QueueAddress,
    QueuePair,
)
from halox.runtime.status import ranks_text
from halox.runtime.waiting import Waiter

ENTRIES = INLINE_BYTES // 16
"""Entries of a list, 16 bytes each."""

MOST_STRIDE = (1 << 16) - 1
"""Largest distance from block to block of a strided pattern, in bytes."""

_REPEATS = 1 << 20
_MOST_BYTES = 1 << 30
_MOST_KEYS, _KEYS_PER_LIST, _POOL = 1 << 14, 256, 64
_RECEIVED = 0  # work request number of all receives


def key_limits(most_message_bytes: int) -> Limits:
    """Return the limits of an adapter's keys; the adapter moves at most ``most_message_bytes`` bytes per message."""
    return Limits(
        entries=ENTRIES,
        repeats=_REPEATS,
        stride_bytes=MOST_STRIDE,
        key_bytes=min(_MOST_BYTES, most_message_bytes),
        keys=_MOST_KEYS,
        keys_per_list=_KEYS_PER_LIST,
        pool=_POOL,
    )


class MappedKey(Key):
    """An indirect key of the adapter.

    ``posted`` counts the incomplete transfers that use it.
    """

    def __init__(self, mkey: Any) -> None:
        self.mkey = mkey
        self.posted = 0


class _Link:
    """The connection to a peer: incomplete work requests in order, with the keys that they use."""

    def __init__(self, pair: QueuePair) -> None:
        self.pair = pair
        self.posted: deque[tuple[int, MappedKey | None]] = deque()


class Mlx5Umr(Engine):
    """Mover of windows between ranks with an mlx5 adapter each; ``waiter`` returns a waiter for completions."""

    name = MLX5_UMR

    def __init__(self, rank: int, adapter: Adapter, waiter: Callable[[], Waiter]) -> None:
        self._rank, self._adapter, self._waiter = rank, adapter, waiter
        self._v = adapter.verbs
        self.limits = key_limits(adapter.max_message_bytes)
        self._pairs: dict[int, QueuePair] = {}
        self._links: dict[int, _Link] = {}
        self._arrived: deque[tuple[int, int]] = deque()
        self._numbers = _RECEIVED
        # Memory may be released while keys refer to it: by lkey, its registration and the number of its mapped keys.
        self._regions: dict[int, tuple[Any, int]] = {}
        self._mapped: Counter[int] = Counter()
        self._ended: set[int] = set()
        # Mapping needs a connection, but not to a peer: this one connects the adapter to itself.
        self._mapper = _Link(self._guarded(lambda: QueuePair(adapter), "a queue pair"))
        self._guarded(
            lambda: self._mapper.pair.connect(self._mapper.pair.address), "a connection to itself"
        )

    def _guarded(self, do: Callable[[], Any], what: str) -> Any:
        try:
            return do()
        except self._v.PyverbsError as error:
            raise PathError(
                f"the adapter {self._adapter.name} of rank {self._rank} refuses {what}: {error}"
            ) from error

    # Connections

    def invite(self, peers: Iterable[int]) -> dict[int, QueueAddress]:
        """Return for each peer the address of the queue pair reserved for it; `connect` takes the peers' addresses."""
        for peer in peers:
            if peer not in self._pairs:
                self._pairs[peer] = self._guarded(lambda: QueuePair(self._adapter), "a queue pair")
        return {peer: self._pairs[peer].address for peer in peers}

    def connect(self, peers: Mapping[int, QueueAddress]) -> None:
        """Connect the queue pairs reserved for peers with the peers' queue pairs."""
        for peer, address in peers.items():
            if peer not in self._links:
                pair = self._pairs[peer]
                self._guarded(
                    lambda pair=pair, address=address: pair.connect(address),  # type: ignore[misc]
                    f"the connection to rank {peer}",
                )
                self._links[peer] = _Link(pair)

    # Memory and keys

    def register(
        self, address: int, nbytes: int, generation: int, device: int | None = None
    ) -> RegisteredRegion:
        """Register memory of the host, or of a GPU by a dmabuf."""
        if device is not None:
            return self._register_dmabuf(address, nbytes, generation, device)
        mr = self._guarded(
            lambda: self._adapter.register(address, nbytes),
            f"to register {nbytes} bytes (`ulimit -l` limits what may be locked)",
        )
        return self._region(RegisteredRegion(address, nbytes, generation, mr.lkey, mr.rkey, mr), 0)

    def _register_dmabuf(
        self, address: int, nbytes: int, generation: int, device: int
    ) -> RegisteredRegion:
        """Register memory of a GPU; keys count its addresses from the page in which it begins."""
        from halox.runtime.gpu.dmabuf import exported

        try:
            with exported(address, nbytes, device) as memory:
                mr = self._guarded(
                    lambda: self._adapter.register_dmabuf(
                        memory.descriptor, nbytes, address - memory.address
                    ),
                    f"to register {nbytes} bytes of GPU {device} by dmabuf",
                )
        except DeviceError as error:
            raise PathError(
                f"rank {self._rank}: {nbytes} bytes of GPU {device} cannot be exported as a dmabuf: {error}; "
                "allocate the field by the grid, or leave the choice of the path to halox"
            ) from error
        region = RegisteredRegion(address, nbytes, generation, mr.lkey, mr.rkey, mr)
        return self._region(region, memory.address)

    def _region(self, region: RegisteredRegion, origin: int) -> RegisteredRegion:
        self._regions[region.lkey] = region.handle, origin
        return region

    def deregister(self, region: RegisteredRegion) -> None:
        """End a registration, when no key is mapped to it any longer."""
        self._ended.add(region.lkey)
        self._release_registration(region.lkey)

    def _release_registration(self, lkey: int) -> None:
        if lkey in self._ended and not self._mapped[lkey]:
            self._ended.discard(lkey)
            self._mapped.pop(lkey, None)
            mr, _ = self._regions.pop(lkey)
            mr.close()

    def make_key(self) -> MappedKey:
        """Make an indirect key, with room for a list and for the header of a strided pattern."""
        return MappedKey(
            self._guarded(lambda: self._adapter.make_key(ENTRIES + 1), "to make another key")
        )

    def destroy_key(self, key: Key) -> None:
        """Destroy a key."""
        assert isinstance(key, MappedKey)
        self._unmap(key)
        key.mkey.close()

    def map(self, key: Key, window: Window) -> None:
        """Map a key to the blocks of a window, and wait until it is mapped."""
        assert isinstance(key, MappedKey)
        if key.posted:
            raise PathError(f"rank {self._rank} maps a key anew that a transfer still uses")
        self._unmap(key)
        addresses = [
            address - self._regions[lkey][1]
            for address, lkey in zip(window.addresses.tolist(), window.lkeys.tolist(), strict=True)
        ]
        qp, v = self._mapper.pair.qp, self._v
        pattern = window.repeated
        is_strided = (
            pattern is not None and pattern[3] > 1 and pattern[1] <= pattern[2] <= MOST_STRIDE
        )
        if not is_strided and len(addresses) > ENTRIES:
            raise PathError(
                f"a window of {len(addresses)} blocks does not fit into a key of {ENTRIES} entries"
            )

        def request() -> None:
            if is_strided:
                assert pattern is not None
                _, length, distance, count = pattern
                entry = v.Mlx5MrInterleaved(
                    addresses[0], length, distance - length, int(window.lkeys[0])
                )
                qp.wr_mr_interleaved(key.mkey, ACCESS, count, [entry])
            else:
                entries = zip(
                    addresses, window.lengths.tolist(), window.lkeys.tolist(), strict=True
                )
                qp.wr_mr_list(key.mkey, ACCESS, [v.SGE(*entry) for entry in entries])

        self._of_mapper(request, SEND_SIGNALED | SEND_INLINE)
        key.window = window
        for lkey in set(window.lkeys.tolist()):
            self._mapped[lkey] += 1

    def _unmap(self, key: MappedKey) -> None:
        if key.window is None:
            return
        qp = self._mapper.pair.qp
        self._of_mapper(lambda: qp.wr_local_inv(key.mkey.lkey), SEND_SIGNALED)
        lkeys, key.window = set(key.window.lkeys.tolist()), None
        for lkey in lkeys:
            self._mapped[lkey] -= 1
            self._release_registration(lkey)

    def _of_mapper(self, request: Callable[[], None], flags: int) -> None:
        link = self._mapper
        self._request(link, request, flags, None, "to map a key")
        self._waiter().until(
            lambda: not self._outstanding(link, self._rank),
            lambda: f"rank {self._rank} has waited for its adapter to map a key",
        )

    def export(self, key: Key) -> RemoteKey:
        """Return the rkey by which peers write to the key."""
        assert isinstance(key, MappedKey)
        return RemoteKey(rkey=key.mkey.rkey)

    # Transfers

    def transfer(self, direction: Direction, key: Key, remote: RemoteKey, peer: int) -> Transfer:
        """Prepare a write; the peer must be connected."""
        assert isinstance(key, MappedKey) and direction == "put", "this engine writes"

        def post(immediate: int | None = None) -> None:
            window = key.window
            assert window is not None
            self.write(peer, remote.rkey, immediate, (key, window.nbytes))

        return post

    def write(
        self, peer: int, rkey: int, immediate: int | None, source: tuple[MappedKey, int] | None
    ) -> None:
        """Post an RDMA write of a key's first bytes, or of no bytes; in order with earlier writes to the peer."""
        link, v = self._links[peer], self._v
        qp = link.pair.qp
        assert immediate is None or 0 <= immediate < 1 << IMMEDIATE_BITS
        self._waiter().until(
            lambda: self._outstanding(link, peer) < SEND_DEPTH,
            lambda: f"rank {self._rank} has waited for rank {peer} to take earlier writes",
            lambda: [peer],
        )

        def request() -> None:
            if immediate is None:
                qp.wr_rdma_write(rkey, 0)
            else:
                qp.wr_rdma_write_imm(rkey, 0, immediate)
            if source is not None:
                key, nbytes = source
                qp.wr_set_sge(v.SGE(0, nbytes, key.mkey.lkey))
            else:
                qp.wr_set_sge(v.SGE(0, 0, 0))

        key = None if source is None else source[0]
        self._request(link, request, SEND_SIGNALED, key, f"a write to rank {peer}")

    def _request(
        self,
        link: _Link,
        build: Callable[[], None],
        flags: int,
        key: MappedKey | None,
        what: str,
    ) -> None:
        """Post one work request."""
        qp = link.pair.qp
        self._numbers += 1

        def post() -> None:
            qp.wr_start()
            qp.wr_id, qp.wr_flags = self._numbers, flags
            build()
            qp.wr_complete()

        self._guarded(post, what)
        link.posted.append((self._numbers, key))
        if key is not None:
            key.posted += 1

    def _poll(self, link: _Link, peer: int) -> None:
        """Process the completions of a link; `PathError` if a work request has failed."""
        while True:
            count, completions = link.pair.cq.poll(16)
            for done in completions:
                if done.status != WC_SUCCESS:
                    raise PathError(
                        f"a work request between rank {self._rank} and rank {peer} has failed on the adapter "
                        f"{self._adapter.name} (status {done.status}, vendor's error {done.vendor_err:#x}); "
                        "make the grid anew, or leave the choice of the path to halox"
                    )
                if done.wr_id == _RECEIVED:
                    self._arrived.append((peer, socket.ntohl(done.imm_data)))
                    link.pair.post_receive()
                    continue
                number, key = link.posted.popleft()
                assert number == done.wr_id, "completions of a queue pair are in order"
                if key is not None:
                    key.posted -= 1
            if count < 16:
                return

    def _outstanding(self, link: _Link, peer: int) -> int:
        """Return the number of incomplete work requests of a link."""
        self._poll(link, peer)
        return len(link.posted)

    def progress(self) -> None:
        """Process completions and arrivals; does not wait."""
        for peer, link in self._links.items():
            self._poll(link, peer)

    def is_idle(self, keys: Iterable[Key]) -> bool:
        """Whether no transfer uses any of some keys, as far as `progress` has noticed."""
        return not any(isinstance(key, MappedKey) and key.posted for key in keys)

    def complete(self) -> None:
        """Wait until all posted writes are complete."""

        def behind() -> list[int]:
            self.progress()
            return [peer for peer, link in self._links.items() if link.posted]

        self._waiter().until(
            lambda: not behind(),
            lambda: (
                f"rank {self._rank} has waited for {ranks_text(behind())} to take what was written to it"
            ),
            behind,
        )

    def notify(self, peer: int, immediate: int) -> None:
        """Send a number to a peer, behind all earlier writes to it, by a write of no bytes."""
        self.write(peer, 0, immediate, None)

    def arrivals(self) -> list[tuple[int, int]]:
        """Return (peer, immediate) for all arrivals since the last call, in order for each peer; does not wait."""
        self.progress()
        arrivals = [*self._arrived]
        self._arrived.clear()
        return arrivals

    def close(self) -> None:
        """Destroy the connections and registrations."""
        for pair in (*self._pairs.values(), self._mapper.pair):
            pair.close()
        for mr, _ in self._regions.values():
            mr.close()
        self._pairs, self._links, self._regions = {}, {}, {}
