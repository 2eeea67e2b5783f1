// Reduces an array of medium size over ranks, in LL128-like packets; see allreduce_array.cu. ELEMENT_BYTES is at most
// 8.
//
// A chunk has one tile (ll128.cu) per warp. Bytes moved between GPUs: 8/7 (ranks - 1) times the array, in each
// direction.

#include "allreduce_array.cu"
#include "ll128.cu"

// The words of a tile that one lane moves; each word is a unit.
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
