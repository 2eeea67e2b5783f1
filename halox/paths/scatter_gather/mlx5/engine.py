"""Memory keys of a network adapter: registration, mapping by user-mode memory registration (UMR), and RDMA writes.

After Suresh et al. 2022, section IV.C-E. A key is an indirect memory key, made once. A work request maps it to the
blocks of a window: to a strided pattern if all blocks are equally far apart, otherwise to a list. A transfer is one
RDMA write from a key of this rank to a key of the peer; offsets in both keys count from 0. A write may also send a
number, the immediate, which the peer gets when the bytes are in place.

The adapter's limits are the limits of rdma-core's work requests (mlx5dv_wr_post(3)). The entries of a key must fit into
the request that maps it. Lengths and distances of a strided pattern have 16 bits; longer values are truncated without
an error.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from halox.errors import DeviceError, PathError
from halox.paths.scatter_gather.mlx5.windows import (
    ENTRIES,
    Limits,
    Registration,
    Window,
)
from halox.runtime.mlx5 import (
    ACCESS,
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

IMMEDIATE_BITS = 32

_RECEIVED = 0  # work request number of all receives


class MemoryKey:
    """An indirect key of the adapter.

    It is mapped to ``nbytes`` bytes of some registered memory, to none at first. ``posted`` counts the incomplete
    writes that use it.
    """

    def __init__(self, mkey: Any) -> None:
        self.mkey = mkey
        self.nbytes, self.posted = 0, 0
        self.registrations: tuple[Registration, ...] = ()

    @property
    def rkey(self) -> int:
        """Number by which peers write to the key; it stays valid when the key is mapped to other blocks."""
        return int(self.mkey.rkey)


class _Link:
    """The connection to a peer: incomplete work requests in order, with the keys that they use."""

    def __init__(self, pair: QueuePair) -> None:
        self.pair = pair
        self.posted: deque[tuple[int, MemoryKey | None]] = deque()


class Mlx5Engine:
    """Keys and connections of this rank's adapter; ``waiter`` returns a waiter for completions. One per context."""

    def __init__(self, rank: int, adapter: Adapter, waiter: Callable[[], Waiter]) -> None:
        self._rank, self._adapter, self._waiter = rank, adapter, waiter
        self._v = adapter.verbs
        self.limits = Limits(key_bytes=min(Limits.key_bytes, adapter.max_message_bytes))
        self._pairs: dict[int, QueuePair] = {}
        self._links: dict[int, _Link] = {}
        self._arrived: deque[tuple[int, int]] = deque()
        self._numbers = _RECEIVED
        self._registrations: list[Registration] = []
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

    def register(self, address: int, nbytes: int, device: int | None = None) -> Registration:
        """Register memory of the host, or of a GPU by a dmabuf."""
        if device is not None:
            return self._register_dmabuf(address, nbytes, device)
        mr = self._guarded(
            lambda: self._adapter.register(address, nbytes),
            f"to register {nbytes} bytes (`ulimit -l` limits what may be locked)",
        )
        return self._registered(mr, 0)

    def _register_dmabuf(self, address: int, nbytes: int, device: int) -> Registration:
        """Register memory of a GPU; requests count its addresses from the page in which it begins."""
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
        return self._registered(mr, memory.address)

    def _registered(self, mr: Any, origin: int) -> Registration:
        self._registrations = [one for one in self._registrations if one.mr is not None]
        self._registrations.append(Registration(mr, origin))
        return self._registrations[-1]

    def deregister(self, registration: Registration) -> None:
        """End a registration, when no key is mapped to it any longer."""
        registration.has_ended = True
        registration.close_if_unused()

    def make_key(self) -> MemoryKey:
        """Make an indirect key, with room for a list and for the header of a strided pattern."""
        return MemoryKey(
            self._guarded(lambda: self._adapter.make_key(ENTRIES + 1), "to make another key")
        )

    def destroy_key(self, key: MemoryKey) -> None:
        self._unmap(key)
        key.mkey.close()

    def map(self, key: MemoryKey, window: Window) -> None:
        """Map a key to the blocks of a window, and wait until it is mapped."""
        if key.posted:
            raise PathError(f"rank {self._rank} maps a key anew that a transfer still uses")
        self._unmap(key)
        qp, v = self._mapper.pair.qp, self._v
        pattern = window.repeated
        if pattern is None and window.lengths.size > ENTRIES:
            raise PathError(
                f"a window of {window.lengths.size} blocks does not fit into a key of {ENTRIES} entries"
            )

        def request() -> None:
            if pattern is not None:
                address, length, distance, count = pattern
                entry = v.Mlx5MrInterleaved(
                    address, length, distance - length, int(window.lkeys[0])
                )
                qp.wr_mr_interleaved(key.mkey, ACCESS, count, [entry])
            else:
                columns = window.addresses, window.lengths, window.lkeys
                entries = zip(*(column.tolist() for column in columns), strict=True)
                qp.wr_mr_list(key.mkey, ACCESS, [v.SGE(*entry) for entry in entries])

        self._of_mapper(request, SEND_SIGNALED | SEND_INLINE)
        key.nbytes, key.registrations = window.nbytes, window.registrations
        for registration in window.registrations:
            registration.n_keys += 1

    def _unmap(self, key: MemoryKey) -> None:
        if not key.registrations:
            return
        qp = self._mapper.pair.qp
        self._of_mapper(lambda: qp.wr_local_inv(key.mkey.lkey), SEND_SIGNALED)
        registrations, key.registrations = key.registrations, ()
        for registration in registrations:
            registration.n_keys -= 1
            registration.close_if_unused()

    def _of_mapper(self, request: Callable[[], None], flags: int) -> None:
        link = self._mapper
        self._request(link, request, flags, None, "to map a key")
        self._waiter().until(
            lambda: not self._outstanding(link, self._rank),
            lambda: f"rank {self._rank} has waited for its adapter to map a key",
        )

    # Transfers

    def write(self, peer: int, rkey: int, immediate: int | None, source: MemoryKey | None) -> None:
        """Post an RDMA write of the window of a key, or of no bytes; in order with earlier writes to the peer."""
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
                qp.wr_set_sge(v.SGE(0, source.nbytes, source.mkey.lkey))
            else:
                qp.wr_set_sge(v.SGE(0, 0, 0))

        self._request(link, request, SEND_SIGNALED, source, f"a write to rank {peer}")

    def _request(
        self,
        link: _Link,
        build: Callable[[], None],
        flags: int,
        key: MemoryKey | None,
        what: str,
    ) -> None:
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

    def complete(self) -> None:

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
        for pair in (*self._pairs.values(), self._mapper.pair):
            pair.close()
        for one in self._registrations:
            if one.mr is not None:
                one.mr.close()
        self._pairs, self._links, self._registrations = {}, {}, []
