// Shared text of strided_copy.cu and strided_add.cu: the table of regions and the walk over it.
//
// The compiler module splices this file in where a kernel says #include "strided_body.cu", because a
// compile cache that hashes only the kernel's own text would not notice a change in here.
//
// A region is `words` words of `word_bytes` bytes, numbered in packed order. Word w lies at
//   source + sum over levels of digit(level) * source_stride(level)      (the target alike),
// where the digits are those of w in the mixed radix of the counts, level 0 the fastest. All strides are
// in bytes and of any sign; words < 2^31, which the planner sees to by cutting larger regions.
//
// Launch shape: one dimension, THREADS threads a block. A chunk is `chunk_words` consecutive words of one
// region; chunk_region[chunk] names the region. Any grid works: blocks stride over the chunks.
//
// Bytes moved: each word is read once and written once; table reads are 192 bytes a chunk, mostly cached.

#ifndef MAX_LEVELS
#define MAX_LEVELS 5  // four levels and the words of a block
#endif
#ifndef WORDS_IN_FLIGHT
#define WORDS_IN_FLIGHT 4  // words a thread loads before it stores the first
#endif
#ifndef THREADS
#define THREADS 128
#endif

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct __align__(16) Level {
    i64 source_stride, target_stride;
    u32 count, magic, shift, unused;  // w / count == mulhi(w, magic) >> shift; magic 0 on the last level
};

struct __align__(16) Region {
    u64 source, target;
    u32 words, first_chunk, word_bytes, levels;
    Level level[MAX_LEVELS];
};

// 16 bytes that travel as one load and one store.
struct __align__(16) Word16 {
    u64 low, high;
};

// Moves the words [first, last) of a region. `Mover::take` loads what is to be stored at a target; all
// loads of a thread's words are issued before its first store, so that their latencies overlap.
template <class Mover, class Word>
__device__ __forceinline__ void move_words(const Region& region, u32 first, u32 last)
{
    for (u32 start = first + threadIdx.x; start < last; start += WORDS_IN_FLIGHT * blockDim.x) {
        u32 rest[WORDS_IN_FLIGHT];
        u64 source[WORDS_IN_FLIGHT], target[WORDS_IN_FLIGHT];
        Word taken[WORDS_IN_FLIGHT];
#pragma unroll
        for (u32 i = 0; i < WORDS_IN_FLIGHT; ++i) {
            rest[i] = start + i * blockDim.x;
            source[i] = region.source;
            target[i] = region.target;
        }
#pragma unroll
        for (u32 k = 0; k < MAX_LEVELS; ++k) {
            if (k < region.levels) {  // the same for all threads of the block
                const Level level = region.level[k];
#pragma unroll
                for (u32 i = 0; i < WORDS_IN_FLIGHT; ++i) {
                    const u32 above = __umulhi(rest[i], level.magic) >> level.shift;
                    const i64 digit = rest[i] - above * level.count;
                    source[i] += digit * level.source_stride;
                    target[i] += digit * level.target_stride;
                    rest[i] = above;
                }
            }
        }
#pragma unroll
        for (u32 i = 0; i < WORDS_IN_FLIGHT; ++i)
            if (start + i * blockDim.x < last)
                taken[i] = Mover::take((const Word*)source[i], (const Word*)target[i]);
#pragma unroll
        for (u32 i = 0; i < WORDS_IN_FLIGHT; ++i)
            if (start + i * blockDim.x < last)
                *(Word*)target[i] = taken[i];
    }
}

// Calls `work(region, first, last)` for every chunk of this block.
template <class Work>
__device__ __forceinline__ void for_each_chunk(
    const Region* __restrict__ regions, const u32* __restrict__ chunk_region, u32 chunks,
    u32 chunk_words, const Work& work)
{
    for (u32 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const Region region = regions[chunk_region[chunk]];
        const u32 first = (chunk - region.first_chunk) * chunk_words;
        const u32 left = region.words - first;
        work(region, first, first + (left < chunk_words ? left : chunk_words));
    }
}
