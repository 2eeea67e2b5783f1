// Kernels that combine arrays by OP on one GPU.
//
// combine: total[i] = OP::of(first[i], value[i]). If there is a mark, the kernel leaves it as it starts, and checks the
// names of messages. The total may be one of the arrays.
//
// copy_marked: total[i] = value[i]. If there is a mark, the kernel leaves it as it starts.
//
// Launch shape: one dimension, any grid. Bytes moved: each operand is read once, and the total is written once.

#ifndef ELEMENT
#define ELEMENT double
#endif
#ifndef OP
#define OP Sum
#endif

#include "run_body.cu"
#include "mark_body.cu"
#include "operations.cu"

extern "C" __global__ void combine(u64 total, u64 first, u64 value, u64 elements, const Mark mark)
{
    const bool marks = mark.words && blockIdx.x == 0;
    const u32 found = marks ? leave_mark(mark) : 0;
    ELEMENT* totals = at_address<ELEMENT>(total);
    const ELEMENT* firsts = at_address<const ELEMENT>(first);
    const ELEMENT* values = at_address<const ELEMENT>(value);
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < elements; i += u64(gridDim.x) * blockDim.x)
        totals[i] = OP::of(firsts[i], values[i]);
    if (marks)
        check_names(mark, found);
}

extern "C" __global__ void copy_marked(u64 total, u64 value, u64 elements, const Mark mark)
{
    if (mark.words && blockIdx.x == 0)
        leave_mark(mark);
    ELEMENT* totals = at_address<ELEMENT>(total);
    const ELEMENT* values = at_address<const ELEMENT>(value);
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < elements; i += u64(gridDim.x) * blockDim.x)
        totals[i] = values[i];
}
