"""Runs the reduction kernels of allreduce_*.cu on the CPU, with one thread per rank.

Only the GPU is simulated: ``transports.allreduce`` lays out the memory and the launch, ``allreduce_plan`` splits the
array, and g++ compiles the kernels. A rank has one or more multiprocessors; each runs its blocks one after another.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from halox.reductions.device import kernel_reductions as allreduce
from halox.reductions.device.kernel_plans import ALLREDUCE, EPOCH_SHIFT, ReductionPlan
from halox.reductions.device.kernel_reductions import (
    FieldReduction,
    KernelReduction,
    make_kernel_reduction,
)
from halox.reductions.field_operations import FieldOperation
from halox.runtime.arrays import Described, describe
from halox.runtime.gpu import pools
from halox.runtime.gpu.compiler import preamble, source
from halox.runtime.gpu.pools import Pool
from tests.fakes.cpu_kernels import FLAGS, aligned, compiled_once, own_copy
from tests.fakes.cpu_peer import HEADER, LIMIT_S, MEMORY, HostArena
from tests.unit.reductions.reduction_oracle import same

_ARGUMENTS = dict.fromkeys(
    ("allreduce_field", "exact_field"),
    "*(const Cells*)arguments[0], *(const Partials*)arguments[1], *(const Allreduce*)arguments[2]",
)
_RUN = """
extern "C" void run(u32 grid, u32 threads, int backwards, const u32* blocks, u32 count, void** arguments)
{{
    launch_blocks(grid, threads, backwards != 0, blocks, count, {function}, {arguments});
}}
"""

Defines = tuple[tuple[str, str], ...]


def built(function: str, defines: Defines, extra: str = "") -> Path:
    """Compile a kernel to a shared library, which acts as one multiprocessor."""
    arguments = _ARGUMENTS.get(function, "*(const Allreduce*)arguments[0]")
    run = _RUN.format(function=function, arguments=arguments)
    text = (
        f'{preamble(defines)}#define POLLS 2\n#include "{HEADER}"\n'
        f"{source(function)}{MEMORY}{run}{extra}"
    )
    flags = [*FLAGS, "-Wno-unused-function", "-Wl,--no-as-needed", "-latomic"]
    return compiled_once(text, *flags)


_loading = threading.Lock()


def multiprocessor(function: str, defines: Defines, rank: int, number: int) -> ctypes.CDLL:
    """Load one copy of the library per multiprocessor and rank, so that each has its own blockIdx and fibers."""
    with _loading:
        return _multiprocessor(function, defines, rank, number)


@cache
def _multiprocessor(function: str, defines: Defines, rank: int, number: int) -> ctypes.CDLL:
    return own_copy(built(function, defines))


class Meeting:
    """Takes the place of a communicator; each thread is a rank."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._told: list[Any] = [None] * size

    def allgather(self, rank: int, told: Any) -> list[Any]:
        self._told[rank] = told
        self._barrier.wait(LIMIT_S)
        found = list(self._told)
        self._barrier.wait(LIMIT_S)
        return found


class ThreadWorld:
    """Takes the place of World on the thread of one rank."""

    def __init__(self, meeting: Meeting, rank: int, limit_s: float) -> None:
        self.rank, self.size, self.limit_s = rank, meeting.size, limit_s
        self._meeting = meeting

    def gather(self, build: Callable[[], Any], step: str) -> tuple[Any, list[Any]]:
        found, error = None, None
        try:
            found = build()
        except Exception as caught:
            error = caught
        said = self._meeting.allgather(self.rank, (found, error))
        for _, error in said:
            if error is not None:
                raise error
        return (found or (None, None))[0], [found[1] for found, _ in said]

    def attempt(self, build: Callable[[], Any], step: str) -> Any:
        return self.gather(lambda: (build(), None), step)[0]


class Launch:
    """Takes the place of PreparedLaunch; `launch` runs the blocks on the host and blocks until they end."""

    def __init__(self, function: Any, blocks: int, threads: int, arguments: Any) -> None:
        _, self.function, self.defines = function
        self.blocks, self.threads, self.arguments = blocks, threads, arguments

    def launch(self, stream: Stream) -> None:
        held = []
        for argument in self.arguments:
            memory = aligned(ctypes.sizeof(argument))
            memory[:] = np.frombuffer(argument, np.uint8)
            held.append(memory)
        pointers = (ctypes.c_void_p * len(held))(*(memory.ctypes.data for memory in held))
        order = stream.order(self.blocks)
        backwards, seed = int(stream.rng.integers(2)), int(stream.rng.integers(1000))

        def on(number: int) -> None:
            library = multiprocessor(self.function, self.defines, stream.rank, number)
            mine = np.ascontiguousarray(order[number :: stream.multiprocessors], np.uint32)
            library.delay(ctypes.c_uint64(seed * 8 + number + 1), ctypes.c_uint(stream.delays))
            library.run(
                ctypes.c_uint(self.blocks),
                ctypes.c_uint(self.threads),
                ctypes.c_int(backwards),
                ctypes.c_void_p(mine.ctypes.data),
                ctypes.c_uint(mine.size),
                pointers,
            )

        if stream.multiprocessors == 1:
            on(0)
            return
        with ThreadPoolExecutor(stream.multiprocessors) as pool:
            for ended in [pool.submit(on, number) for number in range(stream.multiprocessors)]:
                ended.result()


class Stream:
    """Schedule of a rank's launches: the order of its blocks, the number of multiprocessors, and delays."""

    def __init__(self, rank: int, order: str, multiprocessors: int, delays: int, seed: int) -> None:
        self.rank, self.multiprocessors, self.delays = rank, multiprocessors, delays
        self._order = order
        self.rng = np.random.default_rng((seed, rank))
        self.ptr = self

    def order(self, blocks: int) -> np.ndarray:
        if self._order == "random":
            return self.rng.permutation(blocks)
        return np.arange(blocks)[:: -1 if self._order == "backward" else 1]

    def synchronize(self) -> None:
        pass


class AtOnce:
    """Takes the place of StreamOrder; launches block, so that no order between streams needs enforcing."""

    def follow(self, stream: Any) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""


@contextmanager
def without_gpu(sms: int = 2) -> Iterator[None]:
    """Patch the transport to use host memory and `Launch`."""
    runtime = SimpleNamespace(
        memset=lambda pointer, value, nbytes: ctypes.memset(pointer, value, nbytes),
        deviceSynchronize=lambda: None,
        memcpy=lambda target, source, nbytes, kind: ctypes.memmove(target, source, nbytes),
        memcpyDefault=4,
    )
    fake = SimpleNamespace(
        cuda=SimpleNamespace(Device=lambda _: nullcontext(), runtime=runtime),
    )

    def word(device: int) -> Any:
        array = aligned(8)
        return SimpleNamespace(array=array, device_pointer=array.ctypes.data)

    def prepared(
        function: Any, blocks: int, threads: int, arguments: Any, *, device: int, dependent: bool
    ) -> Any:
        return Launch(function, blocks, threads, arguments)

    with (
        patch.object(allreduce, "cupy", lambda: fake),
        patch.object(pools, "HOST_WORDS", Pool(word)),
        patch.object(allreduce, "StreamOrder", AtOnce),
        patch.object(allreduce, "is_capturing", lambda stream=None: False),
        patch.object(
            allreduce, "kernel", lambda name, function, _, defines: (name, function, defines)
        ),
        patch.object(allreduce, "multiprocessors", lambda device: sms),
        patch.object(allreduce, "PreparedLaunch", prepared),
    ):
        yield


def limit_kernels(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Limit the waits of the kernels of reductions that are made from now on."""
    parameter, limit_ns = ReductionPlan.parameter, int(seconds * 1e9)
    monkeypatch.setattr(ReductionPlan, "parameter", lambda *given: parameter(*given[:-1], limit_ns))


class Rank:
    def __init__(self, number: int, arena: HostArena, reduction: Any) -> None:
        self.number, self.arena, self.reduction = number, arena, reduction
        self.cells: list[Any] = []
        self.memory = arena.bytes_of(reduction._block)

    def begin_at(self, epoch: int) -> None:
        """Set the state and the flags to their values after epoch - 1 reductions."""
        plan = self.reduction.plan
        self.memory[plan.state_offset :][:8].view("u8")[:] = (epoch - 1) << EPOCH_SHIFT
        flags = self.memory[plan.flags_offset :][: plan.flag_bytes]
        flags.view("u4")[:] = (epoch - 1) % 2**32

    def limit(self, seconds: float) -> None:
        """Set the time limit of later launches."""
        parameter = np.frombuffer(self.reduction._argument, ALLREDUCE)[0]
        parameter["limit_ns"] = int(seconds * 1e9)

    @property
    def epochs(self) -> int:
        """Number of launches that have ended."""
        state = int(self.memory[self.reduction.plan.state_offset :][:8].view("u8")[0])
        assert state % (1 << EPOCH_SHIFT) == 0
        return state >> EPOCH_SHIFT

    @property
    def failure(self) -> tuple[int, int]:
        """Missing rank + 1 and the epoch; zeros if no rank is missing."""
        return tuple(self.reduction._failure.words[:2].tolist())


def at_once(n: int, work: Callable[[int], Any]) -> list[Any]:
    """Call ``work(i)`` in n threads at the same time and return the results; raises the first error."""
    with ThreadPoolExecutor(n) as pool:
        return [future.result() for future in [pool.submit(work, i) for i in range(n)]]


def connect(
    n: int,
    make: Callable[[Any, Any], Any],
    *,
    limit_s: float = LIMIT_S,
    sms: int = 2,
) -> list[Rank]:
    """Create n ranks, each with the reduction that ``make(world, arena)`` returns."""
    meeting = Meeting(n)

    def one(number: int) -> Rank:
        arena = HostArena()
        arena.retire = lambda block: None  # type: ignore[attr-defined]
        world = ThreadWorld(meeting, number, limit_s)
        return Rank(number, arena, make(world, arena))

    with without_gpu(sms):
        return at_once(n, one)


def connect_arrays(n: int, plan: ReductionPlan, **options: Any) -> list[Rank]:
    def make(world: Any, arena: Any) -> KernelReduction:
        return make_kernel_reduction(world, lambda: KernelReduction(world, arena, plan))

    return connect(n, make, **options)


def connect_fields(
    operation: FieldOperation, fields: Sequence[Any], others: Any = None, **options: Any
) -> list[Rank]:
    """Create ranks that reduce their fields to one number; `number` launches the reduction."""

    def cells_of(rank: int) -> list[Described]:
        return [describe(one[rank]) for one in (fields, others) if one is not None]

    def make(world: Any, arena: Any) -> FieldReduction:
        dtype = fields[world.rank].dtype
        reduction = make_kernel_reduction(
            world, lambda: FieldReduction(world, arena, operation, dtype, world.size)
        )
        # Prepares the launch here, while `without_gpu` is in effect.
        reduction._find(cells_of(world.rank))
        return reduction

    ranks = connect(len(fields), make, **options)
    for rank in ranks:
        rank.cells = cells_of(rank.number)
    return ranks


def number(rank: Rank, target: int, stream: Stream) -> None:
    rank.reduction(rank.cells, target, stream)


def reduce_arrays(
    ranks: Sequence[Rank],
    contents: Callable[[int, int], np.ndarray],
    expected: Callable[[list[np.ndarray]], np.ndarray],
    epochs: int = 5,
    *,
    first: int = 1,
    order: str = "random",
    multiprocessors: int = 1,
    delays: int = 0,
    in_place: bool = False,
    offset: int = 0,
    late_s: Mapping[int, float] | None = None,
    seed: int = 0,
) -> None:
    """Run reductions ``first``, ``first + 1``, ... on all ranks at once, without synchronization between them.

    Parameters
    ----------
    contents : callable
        ``contents(rank, epoch)`` is the input array of a rank.
    expected : callable
        Returns the result for the input arrays of all ranks. Every rank's result must equal it, and the results of
        all ranks must have the same bits.
    offset : int
        Distance of every array's address from a multiple of 256.
    """
    if first != 1:
        for rank in ranks:
            rank.begin_at(first)

    found: dict[int, bytes] = {}

    def work(number: int) -> None:
        rank = ranks[number]
        stream = Stream(number, order, multiprocessors, delays, seed)
        for epoch in range(first, first + epochs):
            mine = contents(number, epoch)
            source = guarded_copy(mine, offset)
            target = source if in_place else guarded_copy(np.zeros_like(mine), offset)
            if late_s:
                time.sleep(late_s.get(number, 0))
            rank.reduction.reduce(source.ctypes.data, target.ctypes.data, stream)
            assert rank.failure == (0, 0), f"rank {number}, epoch {epoch}"
            wanted = expected([contents(other, epoch) for other in range(len(ranks))])
            assert same(target, wanted), f"rank {number}, epoch {epoch}"
            bits = found.setdefault(epoch, target.tobytes())
            assert target.tobytes() == bits, f"rank {number}, epoch {epoch}: not as on other ranks"
            check_guards(target)
            if not in_place:
                assert source.tobytes() == mine.tobytes()
                check_guards(source)
        assert rank.epochs == first + epochs - 1

    with without_gpu():
        at_once(len(ranks), work)
    for rank in ranks:
        rank.arena.check_guards()


def reduce_once(
    ranks: Sequence[Rank], dtype: Any, *, order: str = "random", seed: int = 0, **options: Any
) -> Any:
    """Reduce the fields once and return the number that each rank got."""
    found = [guarded_copy(np.zeros(1, dtype)) for _ in ranks]
    streams = [
        Stream(
            rank.number,
            order,
            *(options.get(k, d) for k, d in (("multiprocessors", 1), ("delays", 0))),
            seed,
        )
        for rank in ranks
    ]
    with without_gpu():
        at_once(len(ranks), lambda i: number(ranks[i], found[i].ctypes.data, streams[i]))
    for rank, one in zip(ranks, found, strict=True):
        assert rank.failure == (0, 0)
        check_guards(one)
        rank.arena.check_guards()
    return [one[0] for one in found]


GUARD_BYTES = 256


def guarded_copy(array: np.ndarray, offset: int = 0) -> np.ndarray:
    """Copy an array to memory with guard bytes on both sides."""
    memory = aligned(array.nbytes + 2 * GUARD_BYTES, offset)
    memory[:] = 0xA5
    found = memory[GUARD_BYTES:][: array.nbytes].view(array.dtype).reshape(array.shape)
    found[...] = array
    return found


def check_guards(array: np.ndarray) -> None:
    """Check that the guard bytes on both sides of an array are unchanged."""
    start = array.ctypes.data
    for address in (start - GUARD_BYTES, start + array.nbytes):
        found = ctypes.string_at(address, GUARD_BYTES)
        assert found == b"\xa5" * GUARD_BYTES
