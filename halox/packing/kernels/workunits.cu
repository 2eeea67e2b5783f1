// workunits: packs or unpacks lists of blocks, cut into equal work units, in one launch.
//
// After Wu et al. 2016, section 3.2: the host cuts a datatype's blocks into units with displacements on both sides, and
// warps process the units. A launch has a table of segments. A segment is a list of similar units for one item of the
// datatype, repeated for `items` items:
//   LISTED   blocks of `block_bytes` bytes; block `unit` is at index[unit] * granule (u32 index) in the array, and at
//            unit * block_bytes in the packed item;
//   REGULAR  the same with index[unit] == unit, so that no list is needed;
//   SHORT    16-byte descriptors (struct Unit) of at most `block_bytes` bytes; 2^lanes_log lanes move a unit, each lane
//            one word of `word` bytes;
//   LONG     descriptors of runs of up to 4096 bytes and any alignment; a warp moves a unit.
// LISTED and REGULAR segments are cut into words. Two multiplications find a word from its number, so that neighbouring
// lanes touch neighbouring packed bytes even if the blocks are short.
//
// All displacements are in bytes: in the array relative to `array`, of any sign, and in the packed bytes relative to
// `packed`. The two addresses may have any alignment; words are as wide as both and the segment allow. A segment has
// less than 2^31 bytes (LISTED, REGULAR) or units (SHORT, LONG).
//
// Launch shape: one dimension, whole warps of threads, at most 256 threads per block, any number of blocks. The blocks
// stride over tiles, which are numbered through all segments. A tile is `tile` bytes (LISTED, REGULAR) or units of one
// segment. Segments are a kernel parameter unless there are too many. Lists are in device memory.
//
// Bytes moved: each byte is read once and written once; also 4 bytes of list per block, or 16 per unit.

#include "run_body.cu"

#define SEGMENTS 32
#define MAX_THREADS 256
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 5  // 48 registers a thread, as many as the code needs
#endif
#ifndef WORDS_IN_FLIGHT
#define WORDS_IN_FLIGHT 4  // words, or short units, that a thread loads before it stores the first one
#endif

enum Form { LISTED, REGULAR, SHORT, LONG };

struct __align__(16) Segment {
    i64 array, packed;       // displacements to which the list's displacements are relative
    i64 extent, item_bytes;  // from item to item, on the array's side and on the packed side
    i64 granule;             // bytes that an index counts
    u64 list;                // address
    u32 first_tile, tile;
    u32 units, items;  // units of one item; items
    u32 units_magic, units_shift;  // block / units == mulhi(block, magic) >> shift, if units > 1
    u32 block_bytes;
    u32 block_magic, block_shift;  // byte / block_bytes == byte * magic >> shift
    u32 word;                      // widest word that divides all displacements and lengths
    u32 form, lanes_log;
};

struct __align__(16) Unit {
    i64 array;
    u64 packed_length;  // packed displacement << 16 | length
};

struct __align__(16) Table {
    const Segment* segments;  // in device memory; null if they are in `segment`
    u32 n_segments, tiles;
    Segment segment[SEGMENTS];
};

// Item of a unit, from the number of the unit among all items.
__device__ __forceinline__ u32 item_of(const Segment& s, u32 unit)
{
    if (s.items == 1)
        return 0;
    return s.units == 1 ? unit : __umulhi(unit, s.units_magic) >> s.units_shift;
}

// Moves the words of a tile of a LISTED or REGULAR segment.
template <bool UNPACK, class Word>
__device__ __forceinline__ void move_blocks(const Segment& s, u64 array, u64 packed, u32 tile)
{
    const u32 log = sizeof(Word) == 16 ? 4 : sizeof(Word) == 8 ? 3 : sizeof(Word) == 4 ? 2 : sizeof(Word) / 2;
    const u32 words = s.block_bytes >> log;
    const u32 all = (s.units * s.items * s.block_bytes) >> log;
    const u32 first = (tile * s.tile) >> log;
    const u32 left = all - first, most = s.tile >> log;
    const u32 last = first + (left < most ? left : most);
    for (u32 start = first + threadIdx.x; start < last; start += WORDS_IN_FLIGHT * blockDim.x) {
        u64 there[WORDS_IN_FLIGHT], here[WORDS_IN_FLIGHT];
        Word taken[WORDS_IN_FLIGHT] = {};
#pragma unroll
        for (u32 i = 0; i < WORDS_IN_FLIGHT; ++i) {
            const u32 n = start + i * blockDim.x;
            const u32 block = u32((u64(n) * s.block_magic) >> (s.block_shift - log));
            const u32 item = item_of(s, block);
            const u32 unit = block - item * s.units;
            u32 index = unit;
            if (s.form == LISTED && n < last)
                index = at_address<const u32>(s.list)[unit];
            there[i] = array + u64(i64(item) * s.extent) + u64(i64(index) * s.granule) +
                       (u64(n - block * words) << log);
            here[i] = packed + u64(i64(item) * s.item_bytes) +
                      (u64(n - item * s.units * words) << log);
        }
#pragma unroll
        for (u32 i = 0; i < WORDS_IN_FLIGHT; ++i)
            if (start + i * blockDim.x < last)
                taken[i] = *at_address<const Word>(UNPACK ? here[i] : there[i]);
#pragma unroll
        for (u32 i = 0; i < WORDS_IN_FLIGHT; ++i)
            if (start + i * blockDim.x < last)
                *at_address<Word>(UNPACK ? there[i] : here[i]) = taken[i];
    }
}

// A unit's addresses on both sides, and its bytes.
struct Run {
    u64 source, target;
    u32 length;
};

template <bool UNPACK>
__device__ __forceinline__ Run run_of(const Segment& s, u64 array, u64 packed, u32 n)
{
    const u32 item = item_of(s, n);
    const Unit unit = at_address<const Unit>(s.list)[n - item * s.units];
    const u64 there = array + u64(i64(item) * s.extent) + u64(unit.array);
    const u64 here = packed + u64(i64(item) * s.item_bytes) + (unit.packed_length >> 16);
    Run run;
    run.source = UNPACK ? here : there;
    run.target = UNPACK ? there : here;
    run.length = u32(unit.packed_length) & 0xffff;
    return run;
}

// Moves SHORT units, if words of at least 4 bytes divide all lengths and displacements: several units in flight.
template <bool UNPACK, class Word>
__device__ __forceinline__ void move_short(
    const Segment& s, u64 array, u64 packed, u32 first, u32 last)
{
    const u32 lane = threadIdx.x & ((1u << s.lanes_log) - 1);
    const u32 groups = blockDim.x >> s.lanes_log;
    const u32 step = u32(sizeof(Word)) << s.lanes_log;
    for (u32 start = first + (threadIdx.x >> s.lanes_log); start < last;
         start += WORDS_IN_FLIGHT * groups) {
        Run run[WORDS_IN_FLIGHT] = {};
#pragma unroll
        for (u32 i = 0; i < WORDS_IN_FLIGHT; ++i) {
            if (start + i * groups < last)
                run[i] = run_of<UNPACK>(s, array, packed, start + i * groups);
        }
        // One iteration, unless the addresses force narrower words than the list would allow.
        for (u32 at = lane * u32(sizeof(Word)); at < s.block_bytes; at += step) {
            Word taken[WORDS_IN_FLIGHT] = {};
#pragma unroll
            for (u32 i = 0; i < WORDS_IN_FLIGHT; ++i)
                if (at < run[i].length)
                    taken[i] = *at_address<const Word>(run[i].source + at);
#pragma unroll
            for (u32 i = 0; i < WORDS_IN_FLIGHT; ++i)
                if (at < run[i].length)
                    *at_address<Word>(run[i].target + at) = taken[i];
        }
    }
}

// Moves LONG units, and SHORT units with an alignment of less than 4 bytes: copy_run chooses the words of each unit.
template <bool UNPACK>
__device__ __forceinline__ void move_runs(
    const Segment& s, u64 array, u64 packed, u32 first, u32 last)
{
    const u32 lanes = 1u << s.lanes_log;
    const u32 lane = threadIdx.x & (lanes - 1);
    const u32 groups = blockDim.x >> s.lanes_log;
    for (u32 n = first + (threadIdx.x >> s.lanes_log); n < last; n += groups) {
        const Run run = run_of<UNPACK>(s, array, packed, n);
        copy_run(run.source, run.target, run.length, lane, lanes);
    }
}

template <bool UNPACK>
__device__ __forceinline__ void move_tile(const Segment& s, u64 array, u64 packed, u32 tile)
{
    array += u64(s.array);
    packed += u64(s.packed);
    const u32 bits = s.word | u32(array) | u32(packed);
    const u32 word = bits & (0u - bits);  // the lowest bit that is set; at most s.word
    if (s.form <= REGULAR) {
        switch (word) {
        case 16: move_blocks<UNPACK, Word16>(s, array, packed, tile); break;
        case 8: move_blocks<UNPACK, u64>(s, array, packed, tile); break;
        case 4: move_blocks<UNPACK, u32>(s, array, packed, tile); break;
        case 2: move_blocks<UNPACK, unsigned short>(s, array, packed, tile); break;
        default: move_blocks<UNPACK, unsigned char>(s, array, packed, tile); break;
        }
        return;
    }
    const u32 first = tile * s.tile;
    const u32 left = s.units * s.items - first;
    const u32 last = first + (left < s.tile ? left : s.tile);
    if (s.form == LONG || word < 4)
        move_runs<UNPACK>(s, array, packed, first, last);
    else if (word == 16)
        move_short<UNPACK, Word16>(s, array, packed, first, last);
    else if (word == 8)
        move_short<UNPACK, u64>(s, array, packed, first, last);
    else
        move_short<UNPACK, u32>(s, array, packed, first, last);
}

template <bool UNPACK>
__device__ __forceinline__ void move_all(u64 array, u64 packed, const Table& table)
{
    for (u32 tile = blockIdx.x; tile < table.tiles; tile += gridDim.x) {
        u32 low = 0, high = table.n_segments;
        while (high - low > 1) {
            const u32 middle = (low + high) / 2;
            const u32 first =
                table.segments ? table.segments[middle].first_tile : table.segment[middle].first_tile;
            if (first <= tile)
                low = middle;
            else
                high = middle;
        }
        const Segment s = table.segments ? table.segments[low] : table.segment[low];
        move_tile<UNPACK>(s, array, packed, tile - s.first_tile);
    }
}

#define ENTRY extern "C" __global__ void __launch_bounds__(MAX_THREADS, BLOCKS_PER_SM)

ENTRY workunits_pack(u64 array, u64 packed, const __grid_constant__ Table table)
{
    move_all<false>(array, packed, table);
}

ENTRY workunits_unpack(u64 array, u64 packed, const __grid_constant__ Table table)
{
    move_all<true>(array, packed, table);
}
