// Shared text of strided_copy.cu and strided_add.cu: the table of regions and the walk over it.
//
// The compiler module (halox.runtime.gpu.compiler) replaces #include "strided_body.cu" by the text of this file,
// because a compile cache that hashes only the kernel's own text would not notice a change here.
//
// A region is `words` words of `word_bytes` bytes, numbered in packed order. Word w is at
//   source + sum over levels of digit(level) * source_stride(level)      (the target alike),
// where the digits are those of w in the mixed radix of the counts, level 0 the fastest. A region names two of
// the launch's bases, which are added to its addresses; base 0 is 0. All strides are in bytes and of any sign;
// words < 2^31, which the planner ensures by cutting larger regions. Levels that a region does not have are all zeros.
//
// A region of runs has word_bytes 0: its blocks are long but not aligned to 4 bytes. `level[0].count` lanes (a power of
// two) move a piece of RUN_PIECE bytes of a run. The lanes take the place of words; if a run has several pieces, level
// 1 counts them. tile_body.cu describes tiled regions (TILED).
//
// Launch shape: one dimension, at most MAX_THREADS threads a block. A chunk is `chunk_words` consecutive
// words of one region, or a tile. Any grid works: blocks stride over the chunks.
//
// The table is a kernel parameter with room for TABLE_REGIONS regions, in which a block finds the region of a chunk by
// bisection. If TABLE_REGIONS is 0, the table is in device memory, with the region of each chunk.
//
// Bytes moved: each word is read once and written once, and the table.

#ifndef MAX_LEVELS
#define MAX_LEVELS 5  // of the regions; four levels and the words of a block at most
#endif
#ifndef WORD_BYTES
#define WORD_BYTES 0  // of all regions, or 0 if they differ
#endif
#ifndef IN_FLIGHT
#define IN_FLIGHT 4  // words that a thread loads before it stores the first word
#endif
#ifndef MAX_THREADS
#define MAX_THREADS 256
#endif
#ifndef TABLE_REGIONS
#define TABLE_REGIONS 1
#endif
#ifndef TILED
#define TILED 0  // sum of the sides of squares in tiled regions, 0 without tiled regions; see tile_body.cu
#endif

#define RUN_PIECE 1024
#define BASES 16  // of a launch, as in strided_plan.py

#include "run_body.cu"

struct __align__(16) Level {
    i64 source_stride, target_stride;
    u32 count, magic, shift;  // w / count == mulhi(w, magic) >> shift; magic 0 on the last level
    u32 extent;  // of a tiled region's levels 0 and 1
};

struct __align__(16) Region {
    u64 source, target;
    u32 words, first_chunk;
    u32 word_bytes;  // lowest 8 bits; the next 8 bits are the number of the source's base, the next 8 of the target's
    u32 run_bytes;
    Level level[MAX_LEVELS];
};

struct Bases {
    u64 base[BASES];

    __device__ __forceinline__ u64 of_source(const Region& region) const { return base[region.word_bytes >> 8 & 255]; }
    __device__ __forceinline__ u64 of_target(const Region& region) const { return base[region.word_bytes >> 16 & 255]; }
};

// Bytes of a region's words, 0 for runs.
__device__ __forceinline__ u32 word_of(const Region& region)
{
    return region.word_bytes & 255;
}

#if TABLE_REGIONS
struct Table {
    Region region[TABLE_REGIONS];
};
#else
struct Table {
    const Region* region;
    const u32* chunk_region;
};
#endif

// Addresses on both sides of words `word`, `word + step`, ... of a region. `Place` is Region, or a struct with the same
// source, target and level.
template <u32 N, class Place>
__device__ __forceinline__ void places(
    const Place& region, u64 source_base, u64 target_base, u32 word, u32 step, u64 (&source)[N], u64 (&target)[N])
{
    u32 rest[N];
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
        rest[i] = word + i * step;
        source[i] = source_base + region.source;
        target[i] = target_base + region.target;
    }
#pragma unroll
    for (u32 k = 0; k < MAX_LEVELS; ++k) {
        const i64 source_stride = region.level[k].source_stride;
        const i64 target_stride = region.level[k].target_stride;
        const u32 count = region.level[k].count;
        const u32 magic = region.level[k].magic;
        const u32 shift = region.level[k].shift;
#pragma unroll
        for (u32 i = 0; i < N; ++i) {
            const u32 above = __umulhi(rest[i], magic) >> shift;
            const i64 digit = rest[i] - above * count;
            source[i] += digit * source_stride;
            target[i] += digit * target_stride;
            rest[i] = above;
        }
    }
}

// Moves the words [first, last) of a region. `Mover::take` loads the value to be stored at a target; all
// loads of a thread's words are issued before its first store, so that their latencies overlap.
template <class Mover, class Word>
__device__ __forceinline__ void move_words(
    const Region& region, u64 source_base, u64 target_base, u32 first, u32 last)
{
    for (u32 start = first + threadIdx.x; start < last; start += IN_FLIGHT * blockDim.x) {
        u64 source[IN_FLIGHT], target[IN_FLIGHT];
        Word taken[IN_FLIGHT] = {};  // initialized, or words of all widths would stay in registers through all loops
        places<IN_FLIGHT>(region, source_base, target_base, start, blockDim.x, source, target);
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; ++i)
            if (start + i * blockDim.x < last)
                taken[i] = Mover::take((const Word*)source[i], (const Word*)target[i]);
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; ++i)
            if (start + i * blockDim.x < last)
                *(Word*)target[i] = taken[i];
    }
}

// Moves the words [first, last) of a region of runs; `first` is a multiple of the lanes.
__device__ __forceinline__ void move_runs(
    const Region& region, u64 source_base, u64 target_base, u32 first, u32 last)
{
    const u32 lanes = region.level[0].count;
    for (u32 word = first + threadIdx.x; word < last; word += blockDim.x) {
        u64 source = source_base + region.source, target = target_base + region.target;
        u32 rest = word, piece = 0;
#pragma unroll
        for (u32 k = 0; k < MAX_LEVELS; ++k) {
            const u32 above = __umulhi(rest, region.level[k].magic) >> region.level[k].shift;
            const u32 digit = rest - above * region.level[k].count;
            source += i64(digit) * region.level[k].source_stride;
            target += i64(digit) * region.level[k].target_stride;
            rest = above;
            if (k == 1)
                piece = digit;
        }
        const u32 before = region.run_bytes > RUN_PIECE ? piece * RUN_PIECE : 0;
        const u32 left = region.run_bytes - before;
        copy_run(source, target, left < RUN_PIECE ? left : RUN_PIECE, word & (lanes - 1), lanes);
    }
}

__device__ __forceinline__ u32 region_of(const Table& table, u32 regions, u32 chunk)
{
#if TABLE_REGIONS
    u32 found = 0;
#pragma unroll
    for (u32 step = 32; step; step >>= 1)
        if (step < TABLE_REGIONS && found + step < regions && table.region[found + step].first_chunk <= chunk)
            found += step;
    return found;
#else
    (void)regions;
    return table.chunk_region[chunk];
#endif
}

__device__ __forceinline__ bool is_tiled(const Region& region)
{
    return TILED && word_of(region) && region.run_bytes;
}

// Calls `work(region, first, last)` for every chunk of this block; a chunk of a tiled region is one tile.
template <class Work>
__device__ __forceinline__ void for_each_chunk(
    const Table& table, u32 regions, u32 chunks, u32 chunk_words, const Work& work)
{
    for (u32 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const Region& region = table.region[region_of(table, regions, chunk)];
        const u32 most = is_tiled(region) ? 1 : chunk_words, first = (chunk - region.first_chunk) * most;
        const u32 left = region.words - first;
        work(region, first, first + (left < most ? left : most));
    }
}

// Calls `run<Word>(region, first, last)` for the region's words.
template <class Run>
__device__ __forceinline__ void with_word(const Run& run, const Region& region, u32 first, u32 last)
{
    switch (WORD_BYTES ? WORD_BYTES : word_of(region)) {
    case 16: run.template with<Word16>(region, first, last); break;
    case 8: run.template with<u64>(region, first, last); break;
    case 4: run.template with<u32>(region, first, last); break;
    case 2: run.template with<unsigned short>(region, first, last); break;
    default: run.template with<unsigned char>(region, first, last); break;
    }
}

#if TILED
#include "tile_body.cu"
#endif
