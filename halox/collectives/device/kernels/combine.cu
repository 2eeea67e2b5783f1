// Two arrays combined by OP on one GPU: total[i] = OP::of(total[i], value[i]), or OP::from(value[i]) for the first.
//
// Launch shape: one dimension, any grid. Bytes moved: both arrays read once (the first: one), one written.

#ifndef ELEMENT
#define ELEMENT double
#endif
#ifndef OP
#define OP Sum
#endif

#include "run_body.cu"
#include "operations.cu"

extern "C" __global__ void combine(u64 total, u64 value, u64 elements, u32 is_first)
{
    ELEMENT* totals = at_address<ELEMENT>(total);
    const ELEMENT* values = at_address<const ELEMENT>(value);
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < elements; i += u64(gridDim.x) * blockDim.x)
        totals[i] = is_first ? OP::from(values[i]) : OP::of(totals[i], values[i]);
}
