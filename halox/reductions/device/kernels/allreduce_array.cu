// Shared text of the kernels that reduce arrays over ranks, whose GPUs map one another's memory. OP combines the ranks'
// ELEMENTs, element by element. On all ranks the result is ((a0 op a1) op a2) op ..., in the order of the ranks: the
// same bits on every rank and in every run.
//
//   allreduce_oneshot    each rank stores its elements in packets into every rank's memory; each rank combines them all
//   allreduce_wide       the same in LL128-like packets, for larger arrays of elements of at most 8 bytes
//   allreduce_scattered  each rank combines one part of the elements and stores the result into every rank's memory
//
// These kernels splice this file in at #include "allreduce_array.cu"; strided_body.cu gives the reason.
//
// `source` and `target` are arrays of `elements` ELEMENTs, the same or disjoint. Their addresses are multiples of the
// size of an ELEMENT (of the size of its parts if it is complex).
//
// Launch shape: one dimension, any number of blocks. The elements are cut into chunks; each block takes the next chunk
// until no chunk is left. No order of blocks can deadlock, even if a GPU cannot run all blocks at once. Proof: consider
// the lowest chunk that is not finished on some rank. All lower chunks are finished on all ranks. So on each rank
// either the block that took the chunk is running, or a block that waits for nothing can take it. These blocks wait
// only for one another, and in each step every block sends all data that its peers need before it waits.

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

__device__ __forceinline__ u32 turns_of(const Allreduce& p)
{
    return p.chunks == gridDim.x ? p.chunks : p.chunks + gridDim.x;
}

// Loads the elements of a unit, with zeros behind the end of the array.
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

// Combines the elements of rank `from` into the total of the ranks before it. There are two assignments, since NVRTC
// 13.0 does not terminate on a conditional expression of complex elements.
__device__ __forceinline__ void combine_unit(Unit<ELEMENT>& all, const Unit<ELEMENT>& one, u32 from)
{
#pragma unroll
    for (u32 k = 0; k < unit_elements<ELEMENT>; ++k)
        if (from)
            all.value[k] = OP::of(all.value[k], one.value[k]);
        else
            all.value[k] = OP::from(one.value[k]);
}

// The `i`th of the other ranks, beginning with the rank after this rank.
__device__ __forceinline__ u32 other_rank(const Allreduce& p, u32 i)
{
    return p.rank + i < ranks_of(p) ? p.rank + i : p.rank + i - ranks_of(p);
}
