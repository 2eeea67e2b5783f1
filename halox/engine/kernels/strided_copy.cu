// strided_copy: copies a table of regions, each strided on both sides, in one launch.
//
// Pack (target contiguous), unpack (source contiguous) and strided-to-strided copies are all this kernel;
// strided_body.cu states the table, the index order, the launch shape and the bytes moved. Targets of
// one launch must not overlap one another nor any source. Pointers may be device memory, a peer's
// memory or the device address of mapped host memory.

#include "strided_body.cu"

struct Copy {
    template <class Word>
    static __device__ __forceinline__ Word take(const Word* source, const Word*)
    {
        return *source;
    }
};

struct CopyWork {
    __device__ __forceinline__ void operator()(const Region& region, u32 first, u32 last) const
    {
        switch (region.word_bytes) {
        case 16: move_words<Copy, Word16>(region, first, last); break;
        case 8: move_words<Copy, u64>(region, first, last); break;
        case 4: move_words<Copy, u32>(region, first, last); break;
        case 2: move_words<Copy, unsigned short>(region, first, last); break;
        default: move_words<Copy, unsigned char>(region, first, last); break;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) strided_copy(
    const Region* regions, const u32* chunk_region, u32 chunks, u32 chunk_words)
{
    for_each_chunk(regions, chunk_region, chunks, chunk_words, CopyWork());
}
