// A field reduction in one launch: combines the cells that a rank owns, and then the values of all ranks.
//
// A field's cells are a region (strided_body.cu) of ELEMENTs. The source of the region is the field. Its target is the
// second field for LOCAL Product, a cell for LOCAL Deviation, and unused otherwise. LOCAL::of(cell, other) is the value of a cell, an ACCUMULATOR.
// OP combines the values. FINISH converts the result, which is stored at `target` as an ACCUMULATOR.
//
// Launch shape: one dimension; a power of two of threads, at least as many as ranks; any number of blocks. Each thread
// combines its cells. Each block combines its threads' values in a tree, and stores the result. The last block to do so
// combines the blocks' results in the same way, exchanges packets with the other ranks (one thread per rank), and
// combines the ranks' values in the order of the ranks. So the bits depend on the launch shape, which the plan
// determines, and not on which block is last. Only the last block waits for other ranks, when all other work is done.
// So no order of blocks can deadlock.
//
// Bytes moved: each cell is read once.

#ifndef ELEMENT
#define ELEMENT double
#endif
#ifndef ACCUMULATOR
#define ACCUMULATOR double
#endif
#ifndef LOCAL
#define LOCAL Value
#endif
#ifndef OP
#define OP Sum
#endif
#ifndef FINISH
#define FINISH Plain
#endif

#include "allreduce_body.cu"

struct Partials {
    u64 at;           // ACCUMULATOR[gridDim.x]
    u64 identity[2];  // identity element of OP, an ACCUMULATOR
};

typedef ACCUMULATOR Accumulator;

template <class T>
__device__ __forceinline__ Accumulator widen(T from) { return Accumulator(from); }
template <class T, class A = Accumulator>
__device__ __forceinline__ A widen(Complex<T> from)
{
    typedef decltype(A::real) Part;
    return {Part(from.real), Part(from.imag)};
}

struct Value {
    template <class T>
    static __device__ __forceinline__ Accumulator of(T cell, u64) { return widen(cell); }
};

// Square of the absolute value, computed in double.
struct Square {
    template <class T>
    static __device__ __forceinline__ double of(T cell, u64) { return double(cell) * double(cell); }
    template <class T>
    static __device__ __forceinline__ double of(Complex<T> cell, u64)
    {
        return double(cell.real) * double(cell.real) + double(cell.imag) * double(cell.imag);
    }
};

// The conjugate of the cell times the cell of the second field.
struct Product {
    template <class T>
    static __device__ __forceinline__ Accumulator of(T cell, u64 other)
    {
        return Prod::of(widen(cell), widen(*at_address<const T>(other)));
    }
    template <class T, class A = Accumulator>
    static __device__ __forceinline__ A of(Complex<T> cell, u64 other)
    {
        A left = widen(cell);
        left.imag = -left.imag;
        return Prod::of(left, widen(*at_address<const Complex<T>>(other)));
    }
};

// The difference from a cell near the mean, the same for all cells of a rank, and its square; both in double.
struct Deviation {
    template <class T>
    static __device__ __forceinline__ Complex<double> of(T cell, u64 other)
    {
        const double away = double(cell) - double(*at_address<const T>(other));
        return {away, away * away};
    }
};

// Combines a value into a total. A complex total is assigned part by part: NVRTC 13.0 does not terminate if a loop
// assigns it as a whole.
template <class T>
__device__ __forceinline__ void take_in(T& all, T value) { all = OP::of(all, value); }
template <class T>
__device__ __forceinline__ void take_in(Complex<T>& all, Complex<T> value)
{
    const Complex<T> sum = OP::of(all, value);
    all.real = sum.real;
    all.imag = sum.imag;
}

struct Plain {
    template <class T>
    static __device__ __forceinline__ T of(T a) { return a; }
};

struct Root {
    template <class T>
    static __device__ __forceinline__ T of(T a) { return sqrt(a); }
};

// Combines the threads' values in a tree; thread 0 returns the result. Called by all threads of the block.
__device__ __forceinline__ Accumulator combine_block(Accumulator mine)
{
    __shared__ Accumulator shared[MAX_THREADS];
    __syncthreads();
    shared[threadIdx.x] = mine;
    for (u32 half = blockDim.x / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            take_in(shared[threadIdx.x], shared[threadIdx.x + half]);
    }
    return shared[0];
}

// Combines all ranks' values in the order of the ranks; the result is valid on thread 0. False if a value did not
// arrive.
__device__ __forceinline__ bool combine_ranks(const Allreduce& p, u32 epoch, Accumulator mine, Accumulator& all)
{
    __shared__ Unit<Accumulator> shared[MOST_RANKS];
    const u32 peer = threadIdx.x;
    const u64 at = (epoch & 1) * p.slot_bytes;
    if (peer == 0)
        shared[p.rank].value[0] = mine;
    __syncthreads();
    const bool has = peer < p.ranks && peer != p.rank;
    if (has)
        send_unit(p.memory[peer] + at + p.rank * p.rank_bytes, shared[p.rank], epoch);
    const bool complete = wait(p, epoch, [&] {
        Unit<Accumulator> came;
        if (!has)
            return 0u;
        if (!take_unit(p.memory[p.rank] + at + peer * p.rank_bytes, came, epoch))
            return peer + 1;
        shared[peer] = came;
        return 0u;
    });
    if (complete && peer == 0) {
        all = OP::from(shared[0].value[0]);
        for (u32 from = 1; from < p.ranks; ++from)
            take_in(all, shared[from].value[0]);
    }
    return complete;
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS) allreduce_field(
    const __grid_constant__ Region region, const __grid_constant__ Partials partials,
    const __grid_constant__ Allreduce p)
{
    wait_for_earlier();
    Unit<Accumulator> identity;
#pragma unroll
    for (u32 i = 0; i < unit_words<Accumulator>; ++i)
        identity.word[i] = partials.identity[i];
    Accumulator mine = identity.value[0];
    const u32 step = gridDim.x * blockDim.x;
    for (u32 start = blockIdx.x * blockDim.x + threadIdx.x; start < region.words; start += IN_FLIGHT * step) {
        u64 cell[IN_FLIGHT], other[IN_FLIGHT];
        ELEMENT taken[IN_FLIGHT] = {};
        places<IN_FLIGHT>(region, 0, 0, start, step, cell, other);
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; ++i)
            if (start + i * step < region.words)
                taken[i] = *at_address<const ELEMENT>(cell[i]);
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; ++i)
            if (start + i * step < region.words)
                take_in(mine, LOCAL::of(taken[i], other[i]));
    }
    mine = combine_block(mine);
    if (threadIdx.x == 0)
        at_address<Accumulator>(partials.at)[blockIdx.x] = mine;
    const Turn turn = take_turn(p, gridDim.x);  // also signals that this block's result is stored
    if (turn.number != gridDim.x - 1)
        return;
    mine = identity.value[0];
    for (u32 block = threadIdx.x; block < gridDim.x; block += blockDim.x)
        take_in(mine, Accumulator(at_address<const Accumulator>(partials.at)[block]));
    mine = combine_block(mine);
    Accumulator all;
    if (combine_ranks(p, turn.epoch, mine, all) && threadIdx.x == 0)
        *at_address<Accumulator>(p.target) = FINISH::of(all);
}
