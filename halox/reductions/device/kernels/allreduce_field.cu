// A field reduction in one launch: combines the cells that a rank owns, and then the values of all ranks.
//
// LOCAL::of(cell, other) is the value of a cell (field_body.cu), an ACCUMULATOR. OP combines the values. FINISH converts
// the result, which is stored at `target` as an ACCUMULATOR. Expressions have all this for each result (expressions.cu).
//
// Launch shape: one dimension; a power of two of threads, at least as many as ranks; any number of blocks. Each thread
// combines its cells. Each block combines its threads' values in a tree, and stores the result. The last block to do so
// combines the blocks' results in the same way, exchanges packets with the other ranks (one thread per rank), and
// combines the ranks' values in the order of the ranks. So the bits depend on the launch shape, which the plan
// determines, and not on which block is last. Only the last block waits for other ranks, when all other work is done.
// So no order of blocks can deadlock.
//
// Bytes moved: each cell is read once.

#ifndef ACCUMULATOR
#define ACCUMULATOR double
#endif
#ifndef OP
#define OP Sum
#endif

#include "field_body.cu"

// Combines a value into a total. A total of two parts is assigned part by part: NVRTC 13.0 does not terminate if a loop
// assigns it as a whole.
template <class Op, class T>
__device__ __forceinline__ void take_in(T& all, T value) { all = Op::of(all, value); }
template <class Op, class T>
__device__ __forceinline__ void take_in(Complex<T>& all, Complex<T> value)
{
    const Complex<T> sum = Op::of(all, value);
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

#ifdef INPUTS
struct alignas(8) Accumulator {
    RESULTS_OF(DECLARE_TOTAL)
};
template <class T>
__device__ __forceinline__ T identity(const Partials& partials, u32 number)
{
    Unit<T> unit;
#pragma unroll
    for (u32 i = 0; i < unit_words<T>; ++i)
        unit.word[i] = partials.identity[2 * number + i];
    return unit.value[0];
}
__device__ __forceinline__ Accumulator begun(const Partials& partials)
{
    Accumulator all;
    RESULTS_OF(BEGIN_TOTAL)
    return all;
}
__device__ __forceinline__ void take_cell(Accumulator& all, [[maybe_unused]] const Operands& cells, const Cell& in)
{
    STEPS
    RESULTS_OF(TAKE_VALUE)
}
__device__ __forceinline__ void merge(Accumulator& all, const Accumulator& other)
{
    RESULTS_OF(MERGE_TOTAL)
}
__device__ __forceinline__ void store(const Allreduce& p, [[maybe_unused]] const Operands& cells, const Accumulator& all)
{
    RESULTS_OF(STORE_TOTAL)
}
#else
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

__device__ __forceinline__ Accumulator begun(const Partials& partials)
{
    Unit<Accumulator> identity;
#pragma unroll
    for (u32 i = 0; i < unit_words<Accumulator>; ++i)
        identity.word[i] = partials.identity[i];
    return identity.value[0];
}
__device__ __forceinline__ void take_cell(Accumulator& all, const Region&, const Cell& cell)
{
    take_in<OP>(all, LOCAL::of(cell.value, cell.other));
}
__device__ __forceinline__ void merge(Accumulator& all, Accumulator other) { take_in<OP>(all, other); }
__device__ __forceinline__ void store(const Allreduce& p, const Region&, Accumulator all)
{
    *at_address<Accumulator>(p.target) = FINISH::of(all);
}
#endif

// Combines the threads' values in a tree; thread 0 returns the result. Called by all threads of the block.
__device__ __forceinline__ Accumulator combine_block(Accumulator mine)
{
    __shared__ Accumulator shared[MAX_THREADS];
    __syncthreads();
    shared[threadIdx.x] = mine;
    for (u32 half = blockDim.x / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            merge(shared[threadIdx.x], shared[threadIdx.x + half]);
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
        all = shared[0].value[0];
        for (u32 from = 1; from < p.ranks; ++from)
            merge(all, shared[from].value[0]);
    }
    return complete;
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS) allreduce_field(
    const __grid_constant__ Cells cells, const __grid_constant__ Partials partials, const __grid_constant__ Allreduce p)
{
    wait_for_earlier();
    Accumulator mine = begun(partials);
    for_each_batch(cells, [&](const Cell (&cell)[IN_FLIGHT], const bool (&has)[IN_FLIGHT]) {
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; ++i)
            if (has[i])
                take_cell(mine, cells, cell[i]);
    });
    mine = combine_block(mine);
    if (threadIdx.x == 0)
        at_address<Accumulator>(partials.at)[blockIdx.x] = mine;
    const Turn turn = take_turn(p, gridDim.x);  // also signals that this block's result is stored
    if (turn.number != gridDim.x - 1)
        return;
    mine = begun(partials);
    for (u32 block = threadIdx.x; block < gridDim.x; block += blockDim.x)
        merge(mine, at_address<const Accumulator>(partials.at)[block]);
    mine = combine_block(mine);
    Accumulator all;
    if (combine_ranks(p, turn.epoch, mine, all) && threadIdx.x == 0)
        store(p, cells, all);
}
