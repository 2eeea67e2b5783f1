// Reduces a small array over ranks, in packets; see allreduce_array.cu.
//
// A chunk has one unit per thread: 8 bytes, or a larger ELEMENT. A slot has, rank by rank, the packets of the rank's
// units, unit_bytes each. Bytes moved between GPUs: 2 (ranks - 1) times the array, in each direction. A launch of one
// block for one chunk takes no turn: it loads the epoch, which does not delay the loads of its elements.

#include "allreduce_array.cu"

// Offset of a unit's packets in the receiver's memory, from the place where the sender stores.
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

// Combines the received units and this rank's unit; false if a unit did not arrive. Called by all threads of the block.
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
        const u64 count = load_state(p.state).count;
        const Unit<ELEMENT> mine = load_unit(p, threadIdx.x);
        const u32 epoch = u32(count >> EPOCH_SHIFT) + 1;
        send_packets(p, mine, threadIdx.x, epoch);
        __syncthreads();  // all threads have loaded the old count
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
