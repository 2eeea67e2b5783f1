"""Runs kernels that store into their neighbours' halos on the CPU, with one thread per rank.

Only the GPU is simulated: ``paths.peer.stores`` makes the (host) memory, the tables and the argument, and g++ compiles
``halo.cu`` with a kernel of the tests.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

import halox
from halox.decomposition import Decomposition, FieldLayout, FieldSpec, exchange_regions
from halox.paths.peer import stores
from halox.runtime.arrays import Described, describe
from tests.fakes.cpu_kernels import FLAGS, compiled_once, own_copy
from tests.fakes.cpu_peer import HEADER, LIMIT_S, MEMORY, HostArena
from tests.fakes.host_cuda import host_cuda

THREADS = 24

_MEMORY = """
struct __attribute__((aligned(16))) State { u64 count, failed; };
struct Word16 { u64 low, high; };
static int __ffs(u32 bits) { return __builtin_ffs(int(bits)); }
static int __popc(u32 bits) { return __builtin_popcount(bits); }
static void* __cvta_global_to_generic(u64 at) { return (void*)at; }
static void fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// Warps of eight lanes. A lane in a function of the warp lets others run until all of its mask have called it.
static struct Lane {
    bool came;
    u32 mask, calls, values[2];
} all_lanes[MOST_THREADS];
static u32 lane() { return threadIdx.x % 8; }
static void yield() { leave(the_block.fibers[the_block.running]); }

// The lanes that have come here since others ran: any part of the warp, as on a GPU.
static u32 __activemask()
{
    Lane &mine = all_lanes[threadIdx.x], *first = &mine - lane();
    mine.came = true, mine.mask = 0;
    yield();
    if (!mine.mask) {
        u32 mask = 0;
        for (u32 n = 0; n < 8; ++n)
            mask |= u32(first[n].came) << n;
        for (u32 n = 0; n < 8; ++n)
            if (first[n].came)
                first[n] = {false, mask, 0, {}};
    }
    return mine.mask;
}
template <class Use>
static u32 lanes_where(u32 lanes, u32 value, Use use)
{
    Lane &mine = all_lanes[threadIdx.x], *first = &mine - lane();
    const u32 call = mine.calls++;
    mine.values[call % 2] = value;
    u32 found = 0;
    for (u32 n = 0; n < 8; ++n)
        if (lanes >> n & 1) {
            while (first[n].calls <= call)
                yield();
            found |= u32(use(first[n].values[call % 2])) << n;
        }
    return found;
}
static u32 __ballot_sync(u32 lanes, bool vote) { return lanes_where(lanes, vote, [](u32 v) { return v != 0; }); }
static bool __all_sync(u32 lanes, bool vote) { return __ballot_sync(lanes, vote) == lanes; }
static void __syncwarp(u32 lanes) { __ballot_sync(lanes, true); }
static u32 __match_any_sync(u32 lanes, u32 value)
{
    return lanes_where(lanes, value, [=](u32 other) { return other == value; });
}
template <class Kernel>
static void launch_warps(u32 grid, u32 threads, const u32* blocks, Kernel kernel)
{
    the_block.kernel = kernel;
    gridDim.x = grid;
    blockDim.x = threads;
    if (the_block.fibers.size() < threads)
        make_fibers(threads);
    for (u32 i = 0; i < grid; ++i) {
        blockIdx.x = blocks ? blocks[i] : i;
        for (Fiber& fiber : the_block.fibers)
            fiber.finished = false;
        for (u32 left = threads; left;)
            for (u32 j = 0; j < threads; ++j)
                if (!the_block.fibers[j].finished) {
                    the_block.running = threadIdx.x = j;
                    enter(the_block.fibers[j]);
                    left -= the_block.fibers[j].finished;
                }
    }
    the_block.kernel = nullptr;
}
"""

# Cells in the order of the array; each is a hash of the cell and of the cells around it at distances up to `reach`.
# Integers that wrap around make any wrong cell visible.
_STEP = """
extern "C" void step_kernel(const halox::Halo<AXES>& halo, int field, const u32* from, int reach, int diagonal,
                            int waits)
{
    int total = 1;
    for (int k = 0; k < AXES; ++k)
        total *= halo.axis[k].end - halo.axis[k].begin;
    for (int number = blockIdx.x * blockDim.x + threadIdx.x; number < total; number += gridDim.x * blockDim.x) {
        int cell[AXES], left = number;
        for (int k = AXES; k-- > 0;) {
            const int extent = halo.axis[k].end - halo.axis[k].begin;
            cell[k] = halo.axis[k].begin + left % extent;
            left /= extent;
        }
        if (waits)
            halo.wait(cell);
        for (u32 c = 0; c < halo.components; ++c) {
            const auto at = [&](int axis, int distance) {
                long long offset = c * halo.component_stride;
                for (int k = 0; k < AXES; ++k)
                    offset += (cell[k] + (diagonal || k == axis ? distance : 0)) * halo.axis[k].stride;
                return *(const u32*)((const char*)from + offset);
            };
            u32 value = at(0, 0) * 5u + c;
            for (int k = 0; k < AXES; ++k)
                for (int i = 1; i <= reach; ++i)
                    value = value * 3u + at(k, -i) + at(k, i) * 7u;
            halo.store(field, cell, value, int(c));
        }
    }
    }
extern "C" void run(u32 grid, u32 threads, const u32* blocks, const void* halo, int field, const u32* from,
                    int reach, int diagonal, int waits)
{
    launch_warps(grid, threads, blocks, [=] {
        step_kernel(*(const halox::Halo<AXES>*)halo, field, from, reach, diagonal, waits);
    });
}
extern "C" void store(const void* halo, int field, const int* cell, u32 value, int component, int wide)
{
    int at[AXES];
    for (int k = 0; k < AXES; ++k)
        at[k] = cell[k];
    if (wide)
        ((const halox::Halo<AXES>*)halo)->store(field, at, u64(value), component);
    else
        ((const halox::Halo<AXES>*)halo)->store(field, at, value, component);
}
extern "C" int wait(const void* halo, const int* cell)
{
    int at[AXES];
    for (int k = 0; k < AXES; ++k)
        at[k] = cell[k];
    bool came = false;
    launch_warps(1, 1, nullptr, [&] { came = ((const halox::Halo<AXES>*)halo)->wait(at); });
    return came;
}
extern "C" {
unsigned long size = sizeof(halox::Halo<AXES>);
}
"""


@cache
def library(rank: int, axes: int, *, debug: bool = False) -> ctypes.CDLL:
    """Load one copy of the library per rank, so that each has its own blockIdx and fibers."""
    text = (
        f'#define AXES {axes}\n#define MOST_THREADS {THREADS}\n#include "{HEADER}"\n{_MEMORY}{MEMORY}'
        f"{halox.device_header(debug=debug)}{_STEP}"
    )
    quiet = "-Wno-unused-function", "-Wno-unused-variable"
    return own_copy(compiled_once(text, *FLAGS, "-Og", *quiet, "-Wl,--no-as-needed", "-latomic"))


class Rank:
    """A rank with its fields, their argument and its copy of the library."""

    def __init__(
        self, domain: Decomposition, number: int, spec: FieldSpec, fields: int, **options: Any
    ) -> None:
        self.number, self.domain = number, domain
        self.layout, self.arena = FieldLayout(domain, number, spec), HostArena()
        self.arrays: list[np.ndarray] = []
        self.read: list[tuple[Described, FieldLayout]] = []
        for _ in range(fields):
            nbytes = 4 * int(np.prod(self.layout.padded_shape))
            memory = self.arena.bytes_of(self.arena.allocate(nbytes))
            array = memory.view("u4").reshape(self.layout.padded_shape)
            array[...] = 0xEEEEEEEE
            self.arrays.append(array)
            found = describe(array)
            described = Described(found.pointer, found.shape, found.strides, found.dtype, 0, True)
            self.read.append((described, self.layout))
        self.library = library(number, domain.ndim, **options)

    def context(self, limit_s: float) -> Any:
        world = SimpleNamespace(rank=self.number, limit_s=limit_s)
        return SimpleNamespace(world=world, device_arena=self.arena)

    @property
    def argument(self) -> int:
        """Address of the kernels' argument."""
        return int(self.channel.argument.ctypes.data)

    def step(
        self,
        field: int,
        source: int,
        reach: int = 1,
        *,
        diagonal: bool = False,
        seed: int = 0,
        delays: int = 0,
        waits: bool = True,
    ) -> None:
        """Launch a step from one field to another; unless it ``waits``, no thread calls ``wait``."""
        rng = np.random.default_rng((seed, self.number))
        owned = int(np.prod([cut.stop - cut.start for cut in self.layout.owned]))
        grid = max(owned // (2 * THREADS), 1)
        blocks = rng.permutation(grid).astype(np.uint32)
        self.library.delay(ctypes.c_uint64(seed * 8 + self.number), ctypes.c_uint(delays))
        self.library.run(
            ctypes.c_uint(grid),
            ctypes.c_uint(THREADS),
            ctypes.c_void_p(blocks.ctypes.data),
            ctypes.c_void_p(self.argument),
            ctypes.c_int(field),
            ctypes.c_void_p(self.arrays[source].ctypes.data),
            ctypes.c_int(reach),
            ctypes.c_int(diagonal),
            ctypes.c_int(waits),
        )

    def store(
        self, field: int, cell: Sequence[int], component: int = 0, wide: bool = False
    ) -> None:
        """Store 77 to a cell, from one thread."""
        at = (ctypes.c_int * len(cell))(*cell)
        self.library.store(
            ctypes.c_void_p(self.argument), field, at, ctypes.c_uint(77), component, int(wide)
        )

    def wait(self, cell: Sequence[int]) -> bool:
        """Wait at a cell, from one thread."""
        at = (ctypes.c_int * len(cell))(*cell)
        return bool(self.library.wait(ctypes.c_void_p(self.argument), at))


def connect(
    domain: Decomposition,
    spec: FieldSpec,
    *,
    fields: int = 2,
    corners: bool = True,
    fixed: Sequence[int] = (),
    limit_s: float = LIMIT_S,
    **options: Any,
) -> list[Rank]:
    """Create the ranks of a grid with some fields, and their channels; ``options`` are those of `library`."""
    ranks = [Rank(domain, number, spec, fields, **options) for number in range(domain.ranks)]
    with host_cuda():
        for rank in ranks:
            regions = exchange_regions(rank.layout, corners, fixed)
            rank.channel = stores.StoreChannel(rank.context(limit_s), rank.read, regions, (), ())
        offers = [rank.channel.offer(None) for rank in ranks]
        for rank in ranks:
            rank.channel.accept({peer: offers[peer][rank.number] for peer in rank.channel.peers})
    return ranks
