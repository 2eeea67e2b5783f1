// strided_copy: copies a table of regions, each strided on both sides, in one launch.
//
// Packs (target contiguous), unpacks (source contiguous) and copies strided to strided;
// strided_body.cu states the table, the index order, the launch shape and the bytes moved. Targets of
// one launch must not overlap one another nor any source. Pointers may be device memory, a peer's
// memory or the device address of mapped host memory.

#include "copy_work.cu"

extern "C" __global__ void __launch_bounds__(MAX_THREADS) strided_copy(
    u64 source_base, u64 target_base, const __grid_constant__ Table table, u32 regions, u32 chunks,
    u32 chunk_words)
{
    for_each_chunk(table, regions, chunks, chunk_words, CopyWork{source_base, target_base});
}
