// Text of halox.device_header(): a user's kernel stores cells into its array and into the halos of the neighbours.
//
// A launch of such a kernel is a step: it reads fields with their halos, and stores other fields with `store`. `wait`
// precedes the reads and the stores of a cell, `done` follows all accesses of a block. Ranks step alike:
//
//     rank A   step n: ... wait | read u | store v, also to B | done: flag n -> B     step n + 1: wait for n of B | ...
//     rank B   step n: ... wait | read u | store v, also to A | done: flag n -> A     step n + 1: wait for n of A | ...
//
// `count` of the state has the finished steps in its upper half (the epoch), and in its lower half the blocks of the
// current step that have called `done`. The last of these blocks stores the number of finished steps to the flag of each
// peer. `wait` in the step after e finished steps waits until the flags of the neighbours concerned have reached e.
// This suffices for steps that do not read the halo of a field that they store:
// - Read after write. The peer's flag e was stored with release, after its blocks had counted with acquire and release,
//   after barriers that follow their stores. So whoever loads e with acquire sees all stores of the peer's step e.
// - Write after read. A store in step e + 1 overwrites halo cells that the peer has read in its step e or earlier. The
//   peer's flag e follows these reads, and in step e + 1 the peer reads no halo that is stored.
// - Progress. Flags e come from launches of step e, which wait only for step e - 1. A launch never waits for its own
//   blocks or for a launch at the same time, so that blocks need not be resident together.
//
// One store a cell, and one for each copy. `sides` are bits: 2k for the low and 2k + 1 for the high side of axis k.
namespace halox {
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
struct __align__(16) Word16 {
    u64 low, high;
};

#include "signals.cu"

#ifndef HALOX_POLLS
#define HALOX_POLLS 64  // loads of a flag between two looks at the clock
#endif
#ifdef __CUDA_ARCH__
__device__ __forceinline__ u32 grid_id()
{
    u64 number;
    asm volatile("mov.u64 %0, %%gridid;" : "=l"(number));
    return u32(number);
}
#endif

// The words of the protocol, which need no layout of a field.
struct Signals {
    u64 state;     // a State; then, for checks, the launch that is under way
    u64 flags;     // addresses of this rank's flags in the memory of its peers
    u64 failure;   // four words that the host reads: kind, epoch, two details
    u64 limit_ns;  // of a wait; 0 without a limit
    u32 peers, directions;

    __device__ u32 epoch() const { return load_loose(state + 4); }

    __device__ bool fail(u32 kind, u32 first = 0, u32 second = 0) const
    {
        if (atomicExch((u32*)(state + 8), 1u) == 0) {
            store_loose(failure + 4, epoch() + 1);
            store_loose(failure + 8, first);
            store_loose(failure + 12, second);
            store_flag(failure, kind);
        }
        return false;
    }

    // Waits until a flag has reached an epoch; false if a wait was given up.
    __device__ bool until(u64 flag, u32 wanted, u32 direction) const
    {
        for (u64 since = 0;;) {
            for (u32 poll = 0; poll < HALOX_POLLS; ++poll)
                if (reached(flag, wanted))
                    return true;
            if (load_loose(state + 8))
                return false;
            const u64 now = nanoseconds();
            since = since ? since : now;
            if (limit_ns && now - since > limit_ns)
                return fail(1 + direction);
        }
    }

    // Ends the step of a block: no accesses to the fields may follow. All threads of all blocks call it, once.
    __device__ void done() const
    {
#ifndef HALOX_CHECKED
        if (!peers)
            return;
#endif
        __syncthreads();
        if (threadIdx.x || threadIdx.y || threadIdx.z)
            return;
        const u32 blocks = gridDim.x * gridDim.y * gridDim.z;
        const u64 before = take_count(state, 1);
        if (u32(before) + 1 != blocks)
            return;
        add_count(state, (1ull << 32) - blocks);
        store_loose(state + 16, 0);
        if (!load_loose(state + 8))  // or else the peers' waits are given up, too
            for (u32 peer = 0; peer < peers; ++peer)
                store_flag(((const u64*)flags)[peer], u32(before >> 32) + 1);
    }
};

struct Axis {
    i64 stride;                 // bytes
    int extent;                 // of the array, halo included
    int begin, low, high, end;  // owned cells; cells below `low` and from `high` on have copies at neighbours
    int near, far, unused;      // cells below `near` and from `far` on read the halo or have copies
};

// A neighbour in one direction: this rank's copy of its flag (0 if the neighbour is this rank itself), its sides, and
// the strides of its arrays in bytes, of the components and of the axes.
template <int N>
struct Direction {
    u64 flag, sides;
    i64 stride[1 + N];
};

// Argument of a kernel, for fields of N axes. Cells are given as in the array, halo included.
template <int N>
struct Halo : Signals {
    u64 direction;  // address of the table of directions
    u64 base;       // for each field the address of cell 0 of this rank's array, and of its copy in each direction
    i64 component_stride;
    u32 components, fields, item_bytes, unused;
    Axis axis[N];

    // Waits for the neighbours that fill the halo around a cell, or have a copy of it. Precedes the reads around the
    // cell, and the store to it. Returns false after a wait was given up: results are not valid from then on.
    __device__ bool wait(const int (&cell)[N]) const
    {
#ifdef HALOX_CHECKED
        const u32 mine = grid_id() + 1, begun = atomicCAS((u32*)(state + 16), 0u, mine);
        if (begun && begun != mine)
            return fail(CHECKED + 19);
#endif
        u32 sides = 0;
#pragma unroll
        for (int k = 0; k < N; ++k)
            sides |= u32(cell[k] < axis[k].near) << 2 * k | u32(cell[k] >= axis[k].far) << (2 * k + 1);
        if (!sides || !peers)
            return true;
        const u32 wanted = epoch();
        const Direction<N>* one = (const Direction<N>*)direction;
        for (u32 d = 0; d < directions; ++d, ++one)
            if (!(u32(one->sides) & ~sides) && one->flag && !until(one->flag, wanted, d))
                return false;
        return true;
    }

    // Stores a cell of field number `field` of the plan, in this rank's array and in each copy.
    template <class T>
    __device__ void store(int field, const int (&cell)[N], T value, int component = 0) const
    {
#ifdef HALOX_CHECKED
        if (!is_inside(field, cell, sizeof(T), component))
            return;
#endif
        const u64* at = (const u64*)base + u64(field) * (directions + 1);
        i64 offset = component * component_stride;
        u32 sides = 0;
        bool owned = true;
#pragma unroll
        for (int k = 0; k < N; ++k) {
            offset += cell[k] * axis[k].stride;
            owned = owned && cell[k] >= axis[k].begin && cell[k] < axis[k].end;
            sides |= u32(cell[k] < axis[k].low) << 2 * k | u32(cell[k] >= axis[k].high) << (2 * k + 1);
        }
        *(T*)(*at + offset) = value;
        if (!owned || !sides)
            return;
        const Direction<N>* one = (const Direction<N>*)direction;
        for (u32 d = 0; d < directions; ++d, ++one)
            if (!(u32(one->sides) & ~sides)) {
                offset = component * one->stride[0];
#pragma unroll
                for (int k = 0; k < N; ++k)
                    offset += cell[k] * one->stride[1 + k];
                *(T*)(at[1 + d] + offset) = value;
            }
    }

#ifdef HALOX_CHECKED
    static const u32 CHECKED = 0x80000000u;

    __device__ bool is_inside(int field, const int (&cell)[N], u32 bytes, int component) const
    {
        for (int k = 0; k < N; ++k)
            if (u32(cell[k]) >= u32(axis[k].extent))
                return fail(CHECKED + k, cell[k], axis[k].extent);
        if (u32(field) >= fields)
            return fail(CHECKED + 16, field, fields);
        if (u32(component) >= components)
            return fail(CHECKED + 17, component, components);
        return bytes == item_bytes || fail(CHECKED + 18, bytes, item_bytes);
    }
#endif
};
}  // namespace halox
