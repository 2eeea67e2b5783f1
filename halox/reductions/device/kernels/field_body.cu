// Shared text of allreduce_field.cu and exact_field.cu: the loop over the cells that a rank owns.
//
// Without INPUTS, a field's cells are a region (strided_body.cu) of ELEMENTs. The source of the region is the field. Its
// target is the second field for LOCAL Product, and unused otherwise.
//
// With INPUTS, a cell has the fields and indices of expressions (expressions.cu). Operand n of a cell is at `operand[n]`
// plus an offset, the sum over levels of digit * stride[set]; operands with equal strides share a set. A field is loaded
// from there; an index is this sum itself. Further operands are the bits of scalars, and addresses of results.

#ifndef ELEMENT
#define ELEMENT double
#endif
#ifndef LOCAL
#define LOCAL Value
#endif
#ifndef FINISH
#define FINISH Plain
#endif
#ifndef RESULTS
#define RESULTS 1
#endif

#include "allreduce_body.cu"

struct Partials {
    u64 at;                     // results of the blocks
    u64 identity[2 * RESULTS];  // identity elements of the operations
};

#ifdef INPUTS
#include "expressions.cu"

struct Operands {
    u64 operand[OPERANDS];
    u32 words, unused;
    struct {
        i64 stride[SETS];
        u32 count, magic, shift, unused;
    } level[MAX_LEVELS];
};

typedef Operands Cells;

struct Cell {
    INPUTS(DECLARE_INPUT)
    __device__ __forceinline__ void load(const Operands& cells, u32 word)
    {
        i64 offset[SETS] = {};
#pragma unroll
        for (u32 k = 0; k < MAX_LEVELS; ++k) {
            const u32 above = __umulhi(word, cells.level[k].magic) >> cells.level[k].shift;
            const i64 digit = word - above * cells.level[k].count;
#pragma unroll
            for (u32 set = 0; set < SETS; ++set)
                offset[set] += digit * cells.level[k].stride[set];
            word = above;
        }
        INPUTS(LOAD_INPUT)
    }
};
#else
typedef Region Cells;

struct Cell {
    ELEMENT value;
    u64 other;
};
#endif

// Calls `take(cell, has)` for IN_FLIGHT cells at a time, all of which a thread loads before; `has` tells which exist.
template <class Take>
__device__ __forceinline__ void for_each_batch(const Cells& cells, const Take& take)
{
    const u32 step = gridDim.x * blockDim.x;
    for (u32 start = blockIdx.x * blockDim.x + threadIdx.x; start < cells.words; start += IN_FLIGHT * step) {
        Cell cell[IN_FLIGHT] = {};
        bool has[IN_FLIGHT];
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; ++i)
            has[i] = start + i * step < cells.words;
#ifdef INPUTS
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; ++i)
            if (has[i])
                cell[i].load(cells, start + i * step);
#else
        u64 source[IN_FLIGHT], target[IN_FLIGHT];
        places<IN_FLIGHT>(cells, 0, 0, start, step, source, target);
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; ++i) {
            cell[i].other = target[i];
            if (has[i])
                cell[i].value = *at_address<const ELEMENT>(source[i]);
        }
#endif
        take(cell, has);
    }
}
