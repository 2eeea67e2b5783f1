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
// `count` of the state grows by one with each cell that has read the number of the step, which is the count divided by
// `cells`: it does not change before the last of these cells has read it. A direction has a number with a digit per axis, to
// the base 3: 0 none, 1 the low side, 2 the high side; masks have a bit per direction.
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
#endif

struct Axis {
    u32 stride;                 // bytes
    int extent;                 // of the array, halo included
    int begin, low, high, end;  // owned cells; cells below `low` and from `high` on have copies at neighbours
    int near, far;              // cells below `near` and from `far` on read the halo or have copies
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
    u64 cells;     // owned cells that wait for another rank in a step, and the first cell
    i64 component_stride;
    u64 own[8];                   // cell 0 of this rank's fields
    u64 signals[DIRECTIONS - 1];  // flags of the neighbours
    u32 waited, stored;           // directions of other ranks, each rank once; directions with copies
    u32 neighbours, fields;       // numbers of signals and of fields
    u32 components, item_bytes;
    Axis axis[N];

    // Waits for the neighbours that fill the halo around a cell, or have a copy of it. Precedes the reads around the
    // cell, and the store to it. Returns false after a wait was given up: results are not valid from then on.
    __device__ bool wait(const int (&cell)[N]) const
    {
        if (is_inner(cell) || !waited)
            return true;
        bool is_first = true, is_owned = true;
        u32 sides = 0;
#pragma unroll
        for (int k = 0; k < N; ++k) {
            is_first = is_first && cell[k] == axis[k].begin;
            is_owned = is_owned && cell[k] >= axis[k].begin && cell[k] < axis[k].end;
            sides |= u32(cell[k] < axis[k].near) << 2 * k | u32(cell[k] >= axis[k].far) << (2 * k + 1);
        }
        const u32 wanted = waited & among(sides), begun = is_first || wanted ? step() : 0;
        if (is_first)
            announce(begun);
        bool came = true;
        for (u32 left = wanted; left; left &= left - 1)
            came = came && until(__ffs(left) - 1, begun);
        if (is_first || (wanted && is_owned))
            add_count(state, 1);
        return came;
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
        *(T*)at = value;
        if (is_inner(cell))
            return;
        u32 sides = 0;
        bool is_owned = true;
#pragma unroll
        for (int k = 0; k < N; ++k) {
            is_owned = is_owned && cell[k] >= axis[k].begin && cell[k] < axis[k].end;
            sides |= u32(cell[k] < axis[k].low) << 2 * k | u32(cell[k] >= axis[k].high) << (2 * k + 1);
        }
        for (u32 left = is_owned ? stored & among(sides) : 0; left; left &= left - 1) {
            const i64* copy = (const i64*)copies + (u32(field) * DIRECTIONS + __ffs(left) - 1) * (2 + N);
            i64 to = copy[0] + component * copy[1];
#pragma unroll
            for (int k = 0; k < N; ++k)
                to += cell[k] * copy[2 + k];
            *(T*)to = value;
        }
    }

private:
    // Whether a cell neither reads the halo nor has copies.
    __device__ bool is_inner(const int (&cell)[N]) const
    {
        bool inner = true;
#pragma unroll
        for (int k = 0; k < N; ++k)
            inner = inner && cell[k] >= axis[k].near && cell[k] < axis[k].far;
        return inner;
    }

    // The directions that lead to some of these sides only; bits 2k and 2k + 1 are the low and the high side of axis k.
    static __device__ u32 among(u32 sides)
    {
        u32 found = 0;
        if (sides)
#pragma unroll
            for (u32 d = 1; d < DIRECTIONS; ++d) {
                const u32 needed = ((1u << d % 3) >> 1) | ((1u << d / 3 % 3) >> 1) << 2 | ((1u << d / 9) >> 1) << 4;
                found |= u32(!(needed & ~sides)) << d;
            }
        return found;
    }

    __device__ u32 step() const { return u32(load_state(state).count / cells) + 1; }

    // Tells the neighbours that this rank's step has begun; not after a failure, so that their waits are given up, too.
    __device__ void announce(u32 begun) const
    {
        const u32 failed = load_loose(state + 8);
        fence();
        for (u32 n = 0; n < neighbours && !failed; ++n)
            store_loose(signals[n], begun);
    }

    // Waits for the flag of a direction; false if a wait was given up.
    __device__ bool until(u32 direction, u32 begun) const
    {
        for (u64 since = 0;;) {
            for (u32 poll = 0; poll < 64; ++poll)
                if (reached(flags + 4 * direction, begun))
                    return true;
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
    }

    __device__ bool fail(u32 kind, u32 first = 0, u32 second = 0) const
    {
        if (atomicExch((u32*)(state + 8), 1u) == 0) {
            store_loose(failure + 4, step());
            store_loose(failure + 8, first);
            store_loose(failure + 12, second);
            store_flag(failure, kind);
        }
        return false;
    }

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
};
}  // namespace halox
