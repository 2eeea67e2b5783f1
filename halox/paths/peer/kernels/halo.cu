// Text of halox.device_header(): a user's kernel stores cells into its array and into the halos of the neighbours.
//
// A launch of such a kernel is a step: it reads fields with their halos, and stores other fields with `store`. `wait`
// precedes the reads and the stores of a cell, once for each cell. Ranks step alike:
//
//     rank A   step n: flag n -> B, wait for flag n of B | read u | store v, also to B      step n + 1: flag n + 1 -> B ...
//     rank B   step n: flag n -> A, wait for flag n of A | read u | store v, also to A      step n + 1: flag n + 1 -> A ...
//
// Flag n says that step n has begun, and so that all earlier work of the stream has ended. This suffices for steps that
// do not read the halo of a field that they store:
// - Read after write. The stores of the peer's step n - 1 happen before its step n, which stores the flag after a fence
//   of the system. So whoever loads the flag with acquire sees these stores.
// - Write after read. A store in step n overwrites halo cells that the peer has read before its step n began. In its
//   step n the peer reads no halo that is stored.
// - Progress. A thread that waits for long stores the flags of its own step, too. So a step needs only one running block
//   to let its neighbours go on, and ends when they have begun: blocks need not be resident together.
//
// The upper half of the state's `count` is the number of steps. Each cell that waits for another rank adds one, and the
// first cell also adds `carry`, so that a step adds 2^32: the upper half does not change before all of them have read it.
// Lanes of a warp that wait for the same ranks do so together: the first of them reads the number, loads the flags with
// acquire, and adds for all; the barrier of the warp orders the reads and stores of the others behind its loads.
//
// A direction has a number with a digit per axis, to the base 3: 0 none, 1 the low side, 2 the high side; masks have a bit
// per direction.
namespace halox {
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
struct __align__(16) Word16 {
    u64 low, high;
};

#include "signals.cu"

#ifdef __CUDA_ARCH__
__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ __forceinline__ u32 lane() { u32 n; asm("mov.u32 %0, %%laneid;" : "=r"(n)); return n; }
#endif

struct Axis {
    u32 stride;                 // bytes
    int begin, low, high, end;  // owned cells; cells below `low` and from `high` on have copies at neighbours
    int far, near;              // cells below `near` and from `far` on read the halo or have copies; along the last axis
    u32 inner;                  // only if another rank is the neighbour; cells between `near` and `far`
};

// Argument of a kernel, for fields of N axes, at most 3. Cells are given as in the array, halo included.
template <int N>
struct Halo {
    static const u32 DIRECTIONS = N == 1 ? 3 : N == 2 ? 9 : 27, CHECKED = 0x80000000u;

    u64 state;     // a State
    u64 flags;     // this rank's flags, one per direction
    u64 copies;    // for each field and direction the address of cell 0, and the strides of components and axes
    u64 failure;   // four words that the host reads: kind, step, two details
    u64 limit_ns;  // of a wait; 0 without a limit
    u64 carry;     // 2^32, less the owned cells that wait for another rank and the first cell
    i64 component_stride;
    i64 row;                      // from a cell to its copy along the last axis, if the rank is its own neighbour there:
    int row_low, row_high;        // upwards for cells below `row_low`, downwards from `row_high` on
    u64 own[8];                   // cell 0 of this rank's fields
    u64 signals[DIRECTIONS - 1];  // flags of the neighbours
    u32 waited, stored;           // directions of other ranks, each rank once; directions with copies
    u32 neighbours, fields;       // numbers of signals and of fields
    u32 components, item_bytes;
    Axis axis[N];
    int extent[N];  // of the array, halo included

    // Waits for the neighbours that fill the halo around a cell, or have a copy of it. Precedes the reads around the
    // cell, and the store to it. Returns false after a wait was given up: results are not valid from then on.
    __device__ bool wait(const int (&cell)[N]) const
    {
#ifdef HALOX_CHECKED
        count_wait(cell);
#endif
        if (!waited || is_inner(cell))
            return true;
        bool is_first = true;
#pragma unroll
        for (int k = 0; k < N; ++k)
            is_first = is_first && cell[k] == axis[k].begin;
        const u32 wanted = waited & among<&Axis::near, &Axis::far>(cell);
        if (!wanted && !is_first)
            return true;
        const u32 lanes = __match_any_sync(__activemask(), wanted);
        const u32 first = __ballot_sync(lanes, is_first);
        const u32 counted = __ballot_sync(lanes, is_first || is_owned(cell));
        bool came = true;
        if (lane() == u32(__ffs(lanes) - 1)) {
            const auto now = load_state(state);
            const u32 begun = u32(now.count >> 32) + 1;
            if (first && !now.failed)
                announce(begun);
            for (u32 left = wanted; left && came; left &= left - 1)
                came = until(__ffs(left) - 1, begun);
            add_count(state, __popc(counted) + (first ? carry : 0));
        }
        __syncwarp(lanes);
        return __all_sync(lanes, came);
    }

    // Stores a cell of field number `field` of the plan, in this rank's array and in each copy.
    template <class T>
    __device__ void store(int field, const int (&cell)[N], T value, int component = 0) const
    {
#ifdef HALOX_CHECKED
        if (!is_inside(field, cell, sizeof(T), component))
            return;
#endif
        u64 at = own[field] + component * component_stride;
#pragma unroll
        for (int k = 0; k < N; ++k)
            at += u64(u32(cell[k])) * axis[k].stride;
        // Without a branch before the stores, the tests and addresses are ready when the value is.
        const bool inner = is_inner(cell);
        const u64 above = at + row, below = at - row;
        put(at, value);
        if (inner & (cell[N - 1] < row_low))
            put(above, value);
        if (inner & (cell[N - 1] >= row_high))
            put(below, value);
        if (inner)
            return;
#pragma unroll 1
        for (u32 left = is_owned(cell) ? stored & among<&Axis::low, &Axis::high>(cell) : 0; left; left &= left - 1) {
            const i64* copy = (const i64*)copies + (u32(field) * DIRECTIONS + __ffs(left) - 1) * (2 + N);
            i64 to = copy[0] + component * copy[1];
#pragma unroll
            for (int k = 0; k < N; ++k)
                to += cell[k] * copy[2 + k];
            put(to, value);
        }
    }

private:
    // Stores to global memory, which a cast of the number to a pointer does not say.
    template <class T>
    static __device__ void put(u64 at, T value) { *(T*)__cvta_global_to_generic(at) = value; }

    __device__ bool is_owned(const int (&cell)[N]) const
    {
        bool owned = true;
#pragma unroll
        for (int k = 0; k < N; ++k)
            owned = owned && cell[k] >= axis[k].begin && cell[k] < axis[k].end;
        return owned;
    }

    // Whether a cell is owned, does not wait, and has copies along the last axis only, if at all.
    __device__ bool is_inner(const int (&cell)[N]) const
    {
        bool inner = true;
#pragma unroll
        for (int k = 0; k < N; ++k)
            inner = inner & (u32(cell[k] - axis[k].near) < axis[k].inner);
        return inner;
    }

    // The directions that lead to sides where the cell is below `LOW`, or not below `HIGH`, and to no others; and bit 0.
    template <int Axis::*LOW, int Axis::*HIGH>
    __device__ u32 among(const int (&cell)[N]) const
    {
        u32 found = 1, power = 1;
#pragma unroll
        for (int k = 0; k < N; ++k, power *= 3)
            found |= (cell[k] < axis[k].*LOW ? found << power : 0) | (cell[k] >= axis[k].*HIGH ? found << 2 * power : 0);
        return found;
    }

    // Tells the neighbours that this rank's step has begun; not after a failure, so that their waits are given up, too.
    __device__ void announce(u32 begun) const
    {
        fence();
#pragma unroll 1
        for (u32 n = 0; n < neighbours; ++n)
            store_loose(signals[n], begun);
    }

    // Waits for the flag of a direction; false if a wait was given up.
    __device__ bool until(u32 direction, u32 begun) const
    {
        const u64 flag = flags + 4 * direction;
        for (u64 since = 0; !reached(flag, begun);) {
            u32 polls = 0;  // without acquire, which would take the L1 cache from the other warps
#pragma unroll 1
            while (polls < 64 && int(load_loose(flag) - begun) < 0)
                ++polls;
            if (polls < 64)
                continue;
            if (load_loose(state + 8))
                return false;
            const u64 now = nanoseconds();
            if (!since) {
                announce(begun);
                since = now;
            }
            if (limit_ns && now - since > limit_ns)
                return fail(direction);
        }
        return true;
    }

    __device__ bool fail(u32 kind, u32 first = 0, u32 second = 0) const
    {
        if (atomicExch((u32*)(state + 8), 1u) == 0) {
            store_loose(failure + 4, u32(load_state(state).count >> 32) + 1);
            store_loose(failure + 8, first);
            store_loose(failure + 12, second);
            store_flag(failure, kind);
        }
        return false;
    }

    __device__ bool is_inside(int field, const int (&cell)[N], u32 bytes, int component) const
    {
        for (int k = 0; k < N; ++k)
            if (u32(cell[k]) >= u32(extent[k]))
                return fail(CHECKED + k, cell[k], extent[k]);
        if (u32(field) >= fields)
            return fail(CHECKED + 16, field, fields);
        if (u32(component) >= components)
            return fail(CHECKED + 17, component, components);
        if (is_owned(cell) && !load_state(state + 16).count)
            return fail(CHECKED + 19);
        return bytes == item_bytes || fail(CHECKED + 18, bytes, item_bytes);
    }

    // Counts the calls of `wait` for owned cells, and adds a number by cell; the numbers of a step add up to zero.
    __device__ void count_wait(const int (&cell)[N]) const
    {
        const auto mixed = [](u64 n) { n *= 0x9e3779b97f4a7c15u; return n ^ n >> 29; };
        u64 at = 0, cells = 1;
        for (int k = 0; k < N; cells *= u32(axis[k].end - axis[k].begin), ++k)
            at = at * u32(axis[k].end - axis[k].begin) + u32(cell[k] - axis[k].begin);
        if (!is_owned(cell))
            return;
        add_count(state + 24, mixed((at + 1) % cells) - mixed(at));
        if ((take_count(state + 16, 1) + 1) % cells == 0 && load_state(state + 16).failed)
            fail(CHECKED + 19);
    }
};
}  // namespace halox
