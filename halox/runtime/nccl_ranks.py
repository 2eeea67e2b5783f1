"""NCCL between the GPUs of all ranks of a communicator.

The first plan or reduction that needs an NCCL communicator creates it collectively; all later ones on the same ranks
share it. It lives until MPI_Finalize or the end of the interpreter, whichever is first, since destroying it waits for
every CUDA graph that contains one of its sends. Then it is aborted: NCCL's threads, which drive transfers over sockets,
would crash while the process ends.

NCCL's kernels, also in graphs, wait for other ranks without a time limit. So the pack kernel of each exchange marks the
start of the exchange in a word of host memory, and the unpack kernel marks the end of the NCCL transfer in a second
word. A thread polls these words. If an exchange runs for ``HALOX_TIMEOUT`` seconds, the thread aborts the communicator.
The NCCL kernels then end, and the next call raises::

    stream   ... | pack |  group of sends and receives  | unpack | ...
    word           1                                      2            a thread looks a few times a second

NCCL matches the sends and receives of two ranks by order alone. So each plan and reduction has a name on its
communicator, a number that is equal on all ranks. The name is at the front of each message, and the unpack kernels
compare the names. Ranks that start their plans in different orders get an error, not another plan's bytes.
"""

from __future__ import annotations

import atexit
import threading
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from halox.errors import DeviceError, ExchangeTimeoutError, HaloxError, MismatchError
from halox.runtime.context import Context
from halox.runtime.deferred import Deferred
from halox.runtime.finalizing import before_finalize
from halox.runtime.gpu import pools
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.marks import Mark
from halox.runtime.gpu.nccl import Nccl, NcclOp, load_nccl, nccl_version_text
from halox.runtime.status import ranks_text
from halox.runtime.world import World

_MAKING = "the making of an NCCL communicator"
_POLLS = 8  # of the marks, in the time limit of an exchange
_MOST_PAUSE_S = 0.5  # between two polls of the marks
_POLL_S = 1e-3  # between two polls of a blocking NCCL call
_SCRATCH_BYTES = 512
_ENDING_S = 2.0  # for the aborts at the end

AHEAD_BYTES = 128
"""Bytes reserved for a name at the front of a message, so that the payload begins at a cache line."""


_living: set[NcclRanks] = set()
"""Communicators that NCCL has not freed yet; `set.copy` is atomic, and threads discard from the set."""


def why_no_nccl(context: Context) -> str | None:
    """Return why the ranks cannot use NCCL, None if they can; equal on all ranks. Collective, for `Context.of_gpus`."""
    world, topology = context.world, context.find_gpus()
    refused = np.flatnonzero(topology.users != 1)
    if refused.size:
        rank = int(refused[0])
        sharers = topology.sharers(rank)
        if sharers:
            return f"ranks {rank} and {sharers[0]} share a GPU, which NCCL refuses"
        return (
            f"rank {rank} has no arrays on a GPU, and NCCL's communicator is of all ranks; leave ranks that have "
            "none out of comm"
        )
    mine = _version()
    versions = world.gather(lambda: (None, mine), "the search for NCCL")[1].distinct
    for rank, (_, why) in enumerate(versions):
        if why:
            return f"rank {rank}: {why}"
    for rank, (version, _) in enumerate(versions):
        if version != versions[0][0]:
            texts = [nccl_version_text(number) for number in (versions[0][0], version)]
            return f"rank 0 has NCCL {texts[0]}, rank {rank} has {texts[1]}; install the same version on all ranks"
    return None


def _version() -> tuple[int, str]:
    """Return the version of NCCL, or 0 and the reason why it cannot be loaded."""
    try:
        return load_nccl().version, ""
    except DeviceError as error:
        return 0, str(error)


def nccl_of(context: Context) -> NcclRanks:
    """Return the NCCL communicator of a context's ranks; create it first if none exists or the last failed. Collective.

    Raises a `HaloxError` on all ranks if it cannot be created within ``HALOX_TIMEOUT`` seconds.
    """
    world, device = context.world, context.device
    assert device is not None
    key = f"nccl on GPU {device}"
    communicator: NcclRanks | None = world.ranks.resources.get(key)
    mine = None if communicator is None or communicator.failed else communicator.unique_id
    # A rank that has used another GPU in between may hold an older communicator.
    is_common = len(world.gather(lambda: (None, mine), _MAKING)[1].distinct) == 1
    if communicator is not None and mine is not None and is_common:
        return communicator
    if communicator is not None:
        communicator.fail("another rank has lost its communicator")
    communicator = world.ranks.resources[key] = NcclRanks(world, device)
    return communicator


class NcclRanks:
    """An NCCL communicator over the ranks of a world, on this rank's GPU, with the same rank numbers.

    The constructor is collective. ``failed`` is the reason for an abort, empty if the communicator works. ``unique_id``
    is the ncclUniqueId of the communicator.
    """

    _kind: type[HaloxError] = ExchangeTimeoutError

    def __init__(self, world: World, device: int) -> None:
        self.rank, self.size, self.device = world.rank, world.size, device
        self.failed = ""
        self._lock = Deferred()
        self._watched: list[Watch] = []
        self._thread: threading.Thread | None = None
        self._connected: set[tuple[bool, int]] = set()
        self._names = 0
        self.unique_id: bytes = world.from_first(lambda: load_nccl().unique_id(), _MAKING)
        self._nccl: Nccl = load_nccl()

        def make() -> int:
            comm: int = _within_limit(
                world,
                device,
                lambda: self._nccl.make(world.size, self.unique_id, world.rank),
                "for the other ranks in ncclCommInitRank",
            )
            return comm

        self._comm: int = world.attempt(make, _MAKING)
        # Started now: while the interpreter ends, Python starts no thread.
        self._is_ending = threading.Event()
        self._ending = threading.Thread(target=self._end, daemon=True)
        self._ending.start()
        _living.add(self)
        before_finalize(world.mpi, _end_all)

    def prepared(self, ops: Sequence[NcclOp]) -> Callable[[int], None]:
        """Return a function that enqueues a group of sends and receives on a stream, given by its address.

        NCCL matches the operations between two ranks in their order. All peers must be connected.
        """
        return self._nccl.prepared(self._comm, ops)

    def connect(self, world: World, targets: Collection[int], sources: Collection[int]) -> int:
        """Connect this rank with its peers now, since NCCL cannot connect them while an exchange is captured.

        Collective over the world: a rank that is a target here must list this rank as a source. Returns a new name for
        messages.
        """
        self._names += 1
        wanted = {(True, peer) for peer in targets} | {(False, peer) for peer in sources}
        new = sorted(wanted - self._connected)

        def run() -> None:
            cuda = cupy().cuda
            memory = cuda.Memory(_SCRATCH_BYTES)
            at = int(memory.ptr)
            ops = [NcclOp(sends, at + sends * 256, 1, peer) for sends, peer in new]
            stream = cuda.Stream(non_blocking=True)
            self.prepared(ops)(stream.ptr)
            stream.synchronize()

        def connect_new() -> None:
            if new:
                peers = sorted({peer for _, peer in new})
                _within_limit(world, self.device, run, f"to be connected with {ranks_text(peers)}")

        try:
            world.attempt(connect_new, "the connection of ranks by NCCL")
        except Exception:
            self.fail("ranks could not be connected")
            raise
        self._connected |= wanted
        return self._names

    def error(self) -> HaloxError:
        return self._kind(self.failed)

    def fail(self, why: str, kind: type[HaloxError] = ExchangeTimeoutError) -> None:
        """Abort the communicator; does not wait for the end of the abort."""
        with self._lock:
            if self.failed:
                return
            self._kind, self.failed = kind, why
            self._is_ending.set()

    def _end(self) -> None:
        """Abort the communicator when `fail` says so, in a thread: it waits for all graphs that contain its sends."""
        self._is_ending.wait()
        self._nccl.abort(self._comm)
        _living.discard(self)

    def join(self, seconds: float) -> None:
        self._ending.join(seconds)

    def watch(self, watch: Watch) -> None:
        with self._lock:
            self._watched.append(watch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._poll, daemon=True)
                self._thread.start()

    def forget(self, watch: Watch) -> None:
        """Stop monitoring a plan's exchanges, and release the watch; may be called by a finalizer on any thread."""

        def end() -> None:
            if watch in self._watched:
                self._watched.remove(watch)
            watch.release()

        self._lock.do(end)

    def _poll(self) -> None:
        """Poll all monitored exchanges; return when no watch is left."""
        while True:
            with self._lock:
                if not self._watched or self.failed:
                    self._thread = None
                    return
                pause = min(watch.limit_s / _POLLS for watch in self._watched)
                failures = [watch.poll() for watch in self._watched]
                failure = next(filter(None, failures), None)
                # Query NCCL under the lock, since an abort frees the communicator.
                if failure is None and (text := self._nccl.failure(self._comm)):
                    failure = text, ExchangeTimeoutError
            if failure is not None:
                self.fail(*failure)
            time.sleep(min(pause, _MOST_PAUSE_S))


@atexit.register
def _end_all() -> None:
    """Abort all communicators; give up after `_ENDING_S` on communicators that graphs keep alive.

    Runs at MPI_Finalize and at the end of the interpreter. A process that ends without a call of MPI_Finalize reaches
    it only after the interpreter, when no callback can run.
    """
    communicators = _living.copy()
    for communicator in communicators:
        communicator.fail("MPI has been finalized")
    end = time.monotonic() + _ENDING_S
    for communicator in communicators:
        communicator.join(max(end - time.monotonic(), 0))


class Watch:
    """Watch of the calls of one plan or reduction, which launch the marks ``begin`` and ``end`` on their stream.

    ``what`` describes the calls in errors. ``name`` is the name of the plan's messages. ``names`` is the device address
    of a table of addresses; there the kernel finds the names of the messages received from ``sources``. ``limit_s`` is
    0 for no time limit; ``begin`` is None then.

    `poll` resets the second word of the marks. So it misses no end between two polls, however short the exchanges are.
    """

    def __init__(
        self,
        ranks: NcclRanks,
        what: str,
        peers: Sequence[int],
        name: int,
        names: int,
        sources: Sequence[int],
        limit_s: float,
    ) -> None:
        self.limit_s, self._ranks, self._what, self._peers = limit_s, ranks, what, peers
        self._name, self._sources = name, sources
        self._buffer = pools.HOST_WORDS.acquire(ranks.device)
        self._buffer.array[:] = 0
        self._words: Any = self._buffer.array.data.cast("I")
        self._since: float | None = None
        self._is_reported = False
        pointer = int(self._buffer.device_pointer)
        self.begin = Mark(pointer, is_end=False) if limit_s else None
        self.end = Mark(pointer, is_end=True, names=names, messages=len(sources), name=name)
        if limit_s:
            ranks.watch(self)

    def check(self) -> None:
        """Raise if a call of this plan, or any other call on the communicator, has failed."""
        ranks = self._ranks
        if self._words[3]:
            ranks.fail(*self._mismatch())
            self._is_reported = True
        if ranks.failed:
            raise ranks.error()

    def poll(self) -> tuple[str, type[HaloxError]] | None:
        """Poll the marks; return text and type of the error if an exchange has failed, else None."""
        now = time.monotonic()
        if self._words[3]:
            return self._mismatch()
        if not self._words[0]:
            self._since = None
            return None
        if self._words[1] or self._since is None:
            self._words[1], self._since = 0, now
            return None
        if now - self._since < self.limit_s:
            return None
        return (
            f"rank {self._ranks.rank} has waited for {ranks_text(self._peers)} in {self._what} by NCCL for "
            f"{self.limit_s:g} s (HALOX_TIMEOUT), on the GPU; what was received in it, and since, is not valid. "
            "A rank has failed, is far behind, or has made another sequence of calls"
        ), ExchangeTimeoutError

    def _mismatch(self) -> tuple[str, type[HaloxError]]:
        plan, number = self._words[2:4]
        return (
            f"rank {self._ranks.rank} has received from rank {self._sources[number - 1]} a message of plan {plan} of "
            f"NCCL's communicator in place of one of plan {self._name} (plans and reductions are counted from 1 as "
            "they are made); what was received in it, and since, is not valid. Start the plans and reductions of the "
            "nccl path, and replay graphs of them, in the same order on all ranks, and make a new grid to go on"
        ), MismatchError

    def close(self) -> bool:
        """End the watch after the last exchange, and return whether an exchange has failed.

        Warns of a mismatch that `check` has not raised.
        """
        is_wrong = bool(self._words[3])
        if is_wrong and not self._is_reported:
            warnings.warn(self._mismatch()[0], stacklevel=3)
        self._ranks.forget(self)
        return is_wrong or bool(self._ranks.failed)

    def release(self) -> None:
        """Return the words of the marks to the pool, once no thread polls them."""
        self._words.release()
        pools.HOST_WORDS.release(self._ranks.device, self._buffer)


def write(device: int, values: Mapping[int, np.ndarray]) -> None:
    """Write arrays to device addresses, and wait for the copies."""
    side, runtime = pools.SIDE_STREAMS.acquire(device), cupy().cuda.runtime
    for at, array in values.items():
        source, kind = array.ctypes.data, runtime.memcpyHostToDevice
        runtime.memcpyAsync(at, source, array.nbytes, kind, side.stream.ptr)
    side.stream.synchronize()
    pools.SIDE_STREAMS.release(device, side)


def _within_limit(world: World, device: int, work: Callable[[], Any], waits: str) -> Any:
    """Run a blocking NCCL call in a thread, and return its result; the thread keeps running after a timeout."""
    results: list[Any] = []
    errors: list[Exception] = []
    ended = threading.Event()

    def run() -> None:
        try:
            with cupy().cuda.Device(device):
                results.append(work())
        except Exception as error:
            errors.append(error)
        finally:
            ended.set()

    threading.Thread(target=run, daemon=True).start()
    # This wait releases the global interpreter lock for the thread.
    world.waiter().until(
        lambda: ended.wait(_POLL_S), lambda: f"rank {world.rank} has waited {waits}"
    )
    if errors:
        raise errors[0]
    return results[0]
