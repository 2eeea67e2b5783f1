// strided_copy: copies a table of regions, each strided on both sides, in one launch.
//
// It packs (contiguous target), unpacks (contiguous source), and copies between strided regions. strided_body.cu states
// the table, the index order, the launch shape and the bytes moved. Targets of one launch must not overlap one another
// or any source. Addresses may be of device memory, of a peer's memory, or of mapped host memory. With MARKED the
// launch leaves a mark as it starts, and checks the names of messages (mark_body.cu).

#ifndef MARKED
#define MARKED 0
#endif

#include "copy_work.cu"
#include "mark_body.cu"

struct BasedCopy {
    const Bases& bases;

    __device__ __forceinline__ void operator()(const Region& region, u32 first, u32 last) const
    {
        CopyWork{bases.of_source(region), bases.of_target(region)}(region, first, last);
    }
};

extern "C" __global__ void __launch_bounds__(MAX_THREADS) strided_copy(
    const __grid_constant__ Bases bases, const __grid_constant__ Table table, u32 regions, u32 chunks, u32 chunk_words
#if MARKED
    , const Mark mark
#endif
)
{
#if MARKED
    const u32 found = blockIdx.x == 0 ? leave_mark(mark) : mark.name;
#endif
    for_each_chunk(table, regions, chunks, chunk_words, BasedCopy{bases});
#if MARKED
    if (blockIdx.x == 0)
        check_names(mark, found);
#endif
}
