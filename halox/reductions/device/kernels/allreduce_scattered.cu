// Reduces a large array over ranks, part by part; see allreduce_array.cu.
//
// A chunk has one part for each of the R ranks, of `chunk_elements` elements, which are a multiple of 16 bytes:
//
//   step 0   rank r: part 0 ... part R-1 of the chunk -> memory of its rank, flag; wait for the flags of all ranks
//   step 1   combine part r, result -> target and memory of all ranks, flag; wait for the flags of all ranks
//            the other ranks' results -> target
//
// A rank's memory holds the values that each rank sends for this rank's parts, then the results that each rank sends: R
// times rank_bytes each. The flags have the same order: for each step one flag per rank and chunk. One slot is enough.
// A rank that sends a part in its launch for e + 1 has received the result of the same chunk in its launch for e;
// before the part's rank sent that result, it had read the values of epoch e. A rank that sends a result in its launch
// for e + 1 has received a part from the peer's launch for e + 1, which began when the peer's launch for e had ended.
// For the same reasons no flag is ahead of the rank that waits for it. Bytes moved: 2 (R - 1) / R times the array, in
// each direction.

#include "allreduce_array.cu"

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
    // Address at which rank `from` stores into the memory of rank `to`, in step 0 or 1.
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

    // Signals to all ranks that this rank has finished a step.
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

    // Combines this rank's part, from vector `begin` up to vector `end`.
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
