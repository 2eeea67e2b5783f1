// Shared text of the kernels that combine arrays of ELEMENTs by OP, element by element, over ranks with a GPU each that
// map one another's memory. On all ranks the result is ((a0 op a1) op a2) op ..., in the order of the ranks: the same
// bits everywhere, always.
//
//   allreduce_oneshot    each rank stores its elements in packets into every rank's memory; all combine all of them
//   allreduce_wide       the same in LL128-like packets, for more than a few elements, each of at most 8 bytes
//   allreduce_scattered  each rank combines its part of the elements and stores the result into every rank's memory
//
// Each is a file, since a reduction uses one of them. Spliced in where it says #include "allreduce_array.cu"; see
// strided_body.cu for why.
//
// `source` and `target` are arrays of `elements` ELEMENTs at multiples of an ELEMENT's size (of its parts' if it is
// complex), the same or disjoint.
//
// Launch shape: one dimension, any number of blocks. The elements are cut into chunks; each block takes the next one
// until none is left. No order of blocks can deadlock, and no two launches need be on their GPUs whole: consider the
// lowest chunk that is not finished on some rank. All ranks' lower ones are, so that on each rank the block that took
// it runs, or no block waits and one can take it; and what it needs of the others is sent by these very blocks, each of
// which sends all that the others need of it at a step before it waits for theirs.

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

// Combines what rank `from` sent into what the ranks before it came to. Two assignments, since NVRTC 13.0 does not end
// where complex elements are chosen in one.
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
