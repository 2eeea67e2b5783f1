// Arrays of ELEMENTs combined by OP, element by element, over ranks with a GPU each that map one another's memory.
// On all ranks the result is ((a0 op a1) op a2) op ..., in the order of the ranks: the same bits everywhere, always.
//
//   allreduce_oneshot    each rank stores its elements in packets into every rank's memory; all combine all of them
//   allreduce_wide       the same in wide packets, for more than a few elements, each of at most 8 bytes
//   allreduce_scattered  each rank combines its part of the elements and stores the result into every rank's memory
//
// `source` and `target` are arrays of `elements` ELEMENTs at multiples of an ELEMENT's size (of its parts' if it is
// complex), the same or disjoint.
//
// Launch shape: one dimension, any number of blocks. The elements are cut into chunks; each block takes the next one
// until none is left. No order of blocks can deadlock, and no two launches need be on their GPUs whole: consider the
// lowest chunk that is not finished on some rank. All ranks' lower ones are, so that on each rank the block that took
// it runs, or no block waits and one can take it; and what it needs of the others is sent by these very blocks, each of
// which sends all that the others need of it at a step before it waits for theirs.
//
// allreduce_oneshot: a chunk is a unit (8 bytes, or a larger ELEMENT) a thread. In a slot: what each rank sends, in
// packets of unit_bytes. Bytes moved over the wire: 2 (ranks - 1) times the array's, each way. A launch of one block for
// one chunk takes no turn: it learns the epoch by a load, which does not hold up the loads of its elements.
//
// allreduce_wide: a chunk is a tile (wide_packets.cu) a warp. Over the wire: 8/7 (ranks - 1) times the array's.
//
// allreduce_scattered: a chunk is `ranks` parts of `chunk_elements`, of a multiple of 16 bytes, a part a rank:
//
//   step 0   rank r: part 0 ... part R-1 of the chunk -> memory of its rank, flag; wait for the flags of all ranks
//   step 1   combine part r, result -> target and memory of all ranks, flag; wait for the flags of all ranks
//            the others' results -> target
//
// In a rank's memory: [what each rank sends of this rank's parts] [each rank's results], R times rank_bytes each; the
// flags of the two steps likewise, one a rank and chunk. One slot is enough. A rank that sends a part in its launch for
// e + 1 has got the result of the same chunk in its launch for e, before which the part's rank had read what was there.
// A rank that sends a result in its launch for e + 1 has got a part from the peer's launch for e + 1, which began when
// the peer's launch for e had ended. So no flag is ahead of who waits for it, either.
// Bytes moved: 2 (R - 1) / R times the array's, each way.

#ifndef ELEMENT
#define ELEMENT double
#endif
#ifndef ELEMENT_BYTES
#define ELEMENT_BYTES 8
#endif
#ifndef OP
#define OP Sum
#endif

#include "allreduce_body.cu"
#include "wide_packets.cu"

__device__ __forceinline__ u32 turns_of(const Allreduce& p)
{
    return p.chunks == gridDim.x ? p.chunks : p.chunks + gridDim.x;
}

// Loads the elements of a unit, zeros behind the array's end.
__device__ __forceinline__ Unit<ELEMENT> load_unit(const Allreduce& p, u64 unit)
{
    const u64 first = unit * unit_elements<ELEMENT>;
    Unit<ELEMENT> found = {};
#pragma unroll
    for (u32 i = 0; i < unit_elements<ELEMENT>; ++i)
        if (first + i < p.elements)
            found.value[i] = at_address<const ELEMENT>(p.source)[first + i];
    return found;
}

__device__ __forceinline__ void store_unit(const Allreduce& p, u64 unit, const Unit<ELEMENT>& all)
{
    const u64 first = unit * unit_elements<ELEMENT>;
#pragma unroll
    for (u32 i = 0; i < unit_elements<ELEMENT>; ++i)
        if (first + i < p.elements)
            at_address<ELEMENT>(p.target)[first + i] = all.value[i];
}

// Combines what rank `from` sent into what the ranks before it came to. Two assignments, since NVRTC 13.0 does not come
// to an end where complex elements are chosen in one.
__device__ __forceinline__ void combine_unit(Unit<ELEMENT>& all, const Unit<ELEMENT>& one, u32 from)
{
#pragma unroll
    for (u32 k = 0; k < unit_elements<ELEMENT>; ++k)
        if (from)
            all.value[k] = OP::of(all.value[k], one.value[k]);
        else
            all.value[k] = OP::from(one.value[k]);
}

// The `i`th of the other ranks, beginning with the next one.
__device__ __forceinline__ u32 other_rank(const Allreduce& p, u32 i)
{
    return p.rank + i < ranks_of(p) ? p.rank + i : p.rank + i - ranks_of(p);
}

// Where a unit's packets are in the memory of the rank that gets them, but for what tells the senders apart.
__device__ __forceinline__ u64 place_of(const Allreduce& p, u64 unit, u32 epoch)
{
    return (epoch & 1) * p.slot_bytes + unit * unit_bytes<ELEMENT>;
}

__device__ __forceinline__ void send_packets(const Allreduce& p, const Unit<ELEMENT>& mine, u64 unit, u32 epoch)
{
    if (unit * unit_elements<ELEMENT> < p.elements)
        for (u32 i = 1; i < ranks_of(p); ++i)
            send_unit(p.memory[other_rank(p, i)] + place_of(p, unit, epoch) + p.rank * p.rank_bytes, mine, epoch);
}

// Combines what comes, and this rank's own; false if something did not come. All threads of the block.
__device__ __forceinline__ bool combine_packets(const Allreduce& p, const Unit<ELEMENT>& mine, u64 unit, u32 epoch)
{
    const bool has = unit * unit_elements<ELEMENT> < p.elements;
    const u64 at = place_of(p, unit, epoch);
    Unit<ELEMENT> all = {};
    for (u32 some = 0; some < ranks_of(p); some += BATCH) {
        Unit<ELEMENT> came[BATCH];
        u32 missing = 0;
#pragma unroll
        for (u32 i = 0; i < BATCH; ++i) {
            came[i] = mine;
            missing |= u32(has && some + i < ranks_of(p) && some + i != p.rank) << i;
        }
        const bool complete = wait(p, epoch, [&] {
            u32 late = 0;
#pragma unroll
            for (u32 i = 0; i < BATCH; ++i)
                if (missing >> i & 1) {
                    if (take_unit(p.memory[p.rank] + at + (some + i) * p.rank_bytes, came[i], epoch))
                        missing &= ~(1u << i);
                    else
                        late = late ? late : some + i + 1;
                }
            return late;
        });
        if (!complete)
            return false;
#pragma unroll
        for (u32 i = 0; i < BATCH; ++i)
            if (some + i < ranks_of(p))
                combine_unit(all, came[i], some + i);
    }
    store_unit(p, unit, all);
    return true;
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS) allreduce_oneshot(const __grid_constant__ Allreduce p)
{
    wait_for_earlier();
    if (p.chunks == 1 && gridDim.x == 1) {
        const State state = load_state(p.state);
        const Unit<ELEMENT> mine = load_unit(p, threadIdx.x);
        if (state.failed)
            return;
        const u32 epoch = u32(state.count >> EPOCH_SHIFT) + 1;
        send_packets(p, mine, threadIdx.x, epoch);
        __syncthreads();  // all threads have seen the old count
        if (threadIdx.x == 0)
            add_count(p.state, 1u << EPOCH_SHIFT);
        combine_packets(p, mine, threadIdx.x, epoch);
        return;
    }
    for (;;) {
        const Turn turn = take_turn(p, turns_of(p));
        if (turn.number >= p.chunks)
            return;
        const u64 unit = u64(turn.number) * blockDim.x + threadIdx.x;
        const Unit<ELEMENT> mine = load_unit(p, unit);
        send_packets(p, mine, unit, turn.epoch);
        if (!combine_packets(p, mine, unit, turn.epoch) || p.chunks == gridDim.x)
            return;
    }
}

#if ELEMENT_BYTES <= 8
// A lane's words of a tile, which are units.
struct LaneOfTile {
    u64 first;  // unit
    static constexpr u32 count = WIDE_BYTES / 8;

    __device__ __forceinline__ Wide load(const Allreduce& p) const
    {
        Unit<ELEMENT> unit[count];
#pragma unroll
        for (u32 i = 0; i < count; ++i)
            unit[i] = load_unit(p, first + 32 * i);
        Wide wide = {};
#pragma unroll
        for (u32 i = 0; i < count; ++i)
            wide.set(i, unit[i].word[0]);
        return wide;
    }
    __device__ __forceinline__ void combine(Wide& all, const Wide& one, u32 from) const
    {
#pragma unroll
        for (u32 i = 0; i < count; ++i) {
            Unit<ELEMENT> before, next;
            before.word[0] = all.word[i];
            next.word[0] = one.word[i];
            combine_unit(before, next, from);
            all.word[i] = before.word[0];
        }
    }
    __device__ __forceinline__ void store(const Allreduce& p, const Wide& all) const
    {
#pragma unroll
        for (u32 i = 0; i < count; ++i) {
            Unit<ELEMENT> unit;
            unit.word[0] = all.word[i];
            store_unit(p, first + 32 * i, unit);
        }
    }
};

extern "C" __global__ void __launch_bounds__(MAX_THREADS) allreduce_wide(const __grid_constant__ Allreduce p)
{
    wait_for_earlier();
    for (;;) {
        const Turn turn = take_turn(p, turns_of(p));
        if (turn.number >= p.chunks)
            return;
        const u32 epoch = turn.epoch, lane = threadIdx.x & 31;
        const u64 tile = u64(turn.number) * (blockDim.x / 32) + (threadIdx.x >> 5);
        const LaneOfTile words = {tile * (TILE_BYTES / 64 * LaneOfTile::count) + lane};
        const bool has = (words.first - lane) * unit_elements<ELEMENT> < p.elements;
        const u64 at = (epoch & 1) * p.slot_bytes + tile * TILE_BYTES + 16 * lane;
        const Wide mine = words.load(p);
        if (has)
            for (u32 i = 1; i < ranks_of(p); ++i)
                mine.send(p.memory[other_rank(p, i)] + at + p.rank * p.rank_bytes, epoch);
        Wide all = {};
        for (u32 from = 0; from < ranks_of(p); ++from) {
            Wide one = mine;
            const bool came = wait(p, epoch, [&] {
                const bool waits = has && from != p.rank;
                return waits && !one.take(p.memory[p.rank] + at + from * p.rank_bytes, epoch) ? from + 1 : 0;
            });
            if (!came)
                return;
            words.combine(all, one, from);
        }
        words.store(p, all);
        if (p.chunks == gridDim.x)
            return;
    }
}
#endif

// Sixteen bytes of elements, or one element.
union Vector {
    Word16 word;
    ELEMENT value[16 / sizeof(ELEMENT)];
};
union Single {
    ELEMENT word;
    ELEMENT value[1];
};

struct Scattered {
    const Allreduce& p;
    const u32 epoch, chunk;

    __device__ __forceinline__ u64 first(u32 part) const
    {
        const u64 first = (u64(chunk) * p.ranks + part) * p.chunk_elements;
        return first < p.elements ? first : p.elements;
    }
    __device__ __forceinline__ u32 length(u32 part) const
    {
        const u64 left = p.elements - first(part);
        return left < p.chunk_elements ? u32(left) : p.chunk_elements;
    }
    // Where rank `from` stores into the memory of rank `to`, at step 0 or 1.
    __device__ __forceinline__ u64 place(u32 to, u32 step, u32 from) const
    {
        return p.memory[to] + (step * p.ranks + from) * p.rank_bytes + u64(chunk) * p.chunk_elements * sizeof(ELEMENT);
    }
    __device__ __forceinline__ u64 flag(u32 to, u32 step, u32 from) const
    {
        return p.memory[to] + p.flags + 4 * (u64(step * p.ranks + from) * p.chunks + chunk);
    }
    __device__ __forceinline__ void copy(u64 source, u64 target, u32 elements) const
    {
        copy_run(source, target, elements * u32(sizeof(ELEMENT)), threadIdx.x, blockDim.x);
    }

    // Tells all ranks that this one's step is done.
    __device__ __forceinline__ void tell(u32 step) const
    {
        __syncthreads();
        for (u32 to = threadIdx.x; to < p.ranks; to += blockDim.x)
            if (to != p.rank)
                store_flag(flag(to, step, p.rank), epoch);
    }
    __device__ __forceinline__ bool hear(u32 step) const
    {
        u32 from = threadIdx.x;
        return wait(p, epoch, [&] {
            while (from < p.ranks && (from == p.rank || reached(flag(p.rank, step, from), epoch)))
                from += blockDim.x;
            return from < p.ranks ? from + 1 : 0u;
        });
    }

    // Combines this rank's part, from vector `begin` of it on.
    template <class Some>
    __device__ __forceinline__ void combine(u32 begin, u32 end) const
    {
        typedef decltype(Some::word) Word;
        const u64 offset = first(p.rank) * sizeof(ELEMENT);
        for (u32 i = begin + threadIdx.x; i < end; i += blockDim.x) {
            const u64 at = u64(i) * sizeof(Word);
            Some all;
            for (u32 from = 0; from < p.ranks; ++from) {
                Some one;
                const u64 own = p.source + offset + at;
                one.word = *at_address<const Word>(from == p.rank ? own : place(p.rank, 0, from) + at);
#pragma unroll
                for (u32 k = 0; k < sizeof(Some) / sizeof(ELEMENT); ++k)
                    all.value[k] = from ? OP::of(all.value[k], one.value[k]) : OP::from(one.value[k]);
            }
            *at_address<Word>(p.target + offset + at) = all.word;
            for (u32 to = 0; to < p.ranks; ++to)
                if (to != p.rank)
                    *at_address<Word>(place(to, 1, p.rank) + at) = all.word;
        }
    }

    __device__ __forceinline__ bool run() const
    {
        for (u32 i = 1; i < p.ranks; ++i) {
            const u32 to = other_rank(p, i);
            copy(p.source + first(to) * sizeof(ELEMENT), place(to, 0, p.rank), length(to));
        }
        tell(0);
        if (!hear(0))
            return false;
        const u32 mine = length(p.rank), each = 16 / sizeof(ELEMENT);
        const u32 vectors = (p.source | p.target) % 16 ? 0 : mine / each;
        combine<Vector>(0, vectors);
        combine<Single>(vectors * each, mine);
        tell(1);
        if (!hear(1))
            return false;
        for (u32 i = 1; i < p.ranks; ++i) {
            const u32 from = other_rank(p, i);
            copy(place(p.rank, 1, from), p.target + first(from) * sizeof(ELEMENT), length(from));
        }
        return true;
    }
};

extern "C" __global__ void __launch_bounds__(MAX_THREADS) allreduce_scattered(const __grid_constant__ Allreduce p)
{
    wait_for_earlier();
    for (;;) {
        const Turn turn = take_turn(p, turns_of(p));
        if (turn.number >= p.chunks || !Scattered{p, turn.epoch, turn.number}.run() || p.chunks == gridDim.x)
            return;
    }
}
