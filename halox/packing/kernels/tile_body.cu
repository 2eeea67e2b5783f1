// Shared text of strided_body.cu: regions whose two sides have different orders of axes, transposed in shared memory.
//
// strided_body.cu splices this file in at #include "tile_body.cu"; it gives the reason, and describes regions.
//
// A tiled region has nonzero word_bytes and run_bytes. Its elements are `words` consecutive words of word_bytes. Level
// 0 is the axis with consecutive elements of the source, and level 1 the axis with consecutive elements of the target.
// Of these levels `count` is the number of tiles, and `extent` the number of elements. All other levels are loops
// around the tiles.
//
// A block loads a tile in rows along the source and stores it in rows along the target. 2^k lanes move a row, so that
// both sides move whole sectors. If both axes are contiguous and the alignment allows it, a thread loads and stores
// SIDE words at once: it transposes squares of SIDE x SIDE words in its registers. Such a group of words is one word of
// the tile in shared memory. Rows of the tile are an odd number of elements apart (of 4-byte words for shorter words),
// so that the words that a warp stores or loads at once are in different banks.
//
// run_bytes holds the shape, lowest bits first: in 9 bits the elements along level 0, in 9 bits those along level 1, in
// 6 bits words - 1, in 3 bits the logarithm of the lanes of a row along the source, in 3 bits the same along the
// target, in 2 bits the logarithm of SIDE. TILED is the sum of the sides that occur.
//
// Launch shape: a multiple of 32 threads. All threads of a block must process the same tiles, because of barriers.

#ifndef TILE_IN_FLIGHT
#define TILE_IN_FLIGHT 4  // words that a thread loads before it stores the first word
#endif

#define TILE_MEMORY 26112  // bytes, as in tiles.py

__device__ __forceinline__ Word16* tile_memory()
{
    __shared__ Word16 memory[TILE_MEMORY / sizeof(Word16)];
    return memory;
}

// SIDE words that are loaded and stored in one access.
template <class Word, u32 SIDE>
struct __align__(SIDE * sizeof(Word)) Group {
    Word word[SIDE];
};

template <>
struct Group<unsigned char, 4> {
    u32 words;
};

template <>
struct Group<unsigned short, 2> {
    u32 words;
};

template <>
struct __align__(8) Group<unsigned short, 4> {
    u32 low, high;
};

// Transposes a square.
template <class Word, u32 SIDE>
__device__ __forceinline__ void turn(Group<Word, SIDE> (&square)[SIDE])
{
#pragma unroll
    for (u32 i = 1; i < SIDE; ++i)
#pragma unroll
        for (u32 j = 0; j < i; ++j) {
            const Word word = square[i].word[j];
            square[i].word[j] = square[j].word[i];
            square[j].word[i] = word;
        }
}

__device__ __forceinline__ u32 bytes_of(u32 low, u32 high, u32 selected)
{
#ifdef __CUDA_ARCH__
    return __byte_perm(low, high, selected);
#else
    const u64 both = low | u64(high) << 32;
    u32 found = 0;
    for (u32 i = 0; i < 4; ++i)
        found |= u32(both >> (8 * (selected >> (4 * i) & 7)) & 255) << (8 * i);
    return found;
#endif
}

__device__ __forceinline__ void turn(u32& first, u32& second)
{
    const u32 low = bytes_of(first, second, 0x5410);
    second = bytes_of(first, second, 0x7632);
    first = low;
}

__device__ __forceinline__ void turn(Group<unsigned short, 2> (&square)[2])
{
    turn(square[0].words, square[1].words);
}

__device__ __forceinline__ void turn(Group<unsigned short, 4> (&square)[4])
{
#pragma unroll
    for (u32 i = 0; i < 4; i += 2) {
        turn(square[i].low, square[i + 1].low);
        turn(square[i].high, square[i + 1].high);
    }
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        const u32 corner = square[i].high;
        square[i].high = square[i + 2].low;
        square[i + 2].low = corner;
    }
}

__device__ __forceinline__ void turn(Group<unsigned char, 4> (&square)[4])
{
    const u32 a = bytes_of(square[0].words, square[1].words, 0x5140), b = bytes_of(square[0].words, square[1].words, 0x7362);
    const u32 c = bytes_of(square[2].words, square[3].words, 0x5140), d = bytes_of(square[2].words, square[3].words, 0x7362);
    square[0].words = bytes_of(a, c, 0x5410);
    square[1].words = bytes_of(a, c, 0x7632);
    square[2].words = bytes_of(b, d, 0x5410);
    square[3].words = bytes_of(b, d, 0x7632);
}

// A tile, with its addresses on both sides.
struct Tile {
    u64 source, target;
    i64 source_a, source_b, target_a, target_b;  // strides
    u32 most_a, most_b, count_a, count_b;        // elements of a whole tile and of this one
    u32 words, log_a, log_b;
};

// Returns the digit of a level in `rest`, and leaves in `rest` the number for the levels above.
__device__ __forceinline__ u32 take_digit(const Level& level, u32& rest)
{
    const u32 above = level.count == 1 ? rest : __umulhi(rest, level.magic) >> level.shift;
    const u32 digit = rest - above * level.count;
    rest = above;
    return digit;
}

__device__ __forceinline__ Tile tile_of(const Region& region, u64 source_base, u64 target_base, u32 number)
{
    const Level &a = region.level[0], &b = region.level[1];
    const u32 form = region.run_bytes;
    Tile tile;
    tile.most_a = form & 511, tile.most_b = form >> 9 & 511;
    tile.words = (form >> 18 & 63) + 1;
    tile.log_a = form >> 24 & 7, tile.log_b = form >> 27 & 7;
    tile.source_a = a.source_stride, tile.source_b = b.source_stride;
    tile.target_a = a.target_stride, tile.target_b = b.target_stride;
    u32 rest = number;
    const u32 first_a = take_digit(a, rest) * tile.most_a, first_b = take_digit(b, rest) * tile.most_b;
    tile.source = source_base + region.source + first_a * tile.source_a + first_b * tile.source_b;
    tile.target = target_base + region.target + first_a * tile.target_a + first_b * tile.target_b;
#pragma unroll
    for (u32 k = 2; k < MAX_LEVELS; ++k) {
        const u32 digit = take_digit(region.level[k], rest);
        tile.source += digit * region.level[k].source_stride;
        tile.target += digit * region.level[k].target_stride;
    }
    tile.count_a = a.extent - first_a < tile.most_a ? a.extent - first_a : tile.most_a;
    tile.count_b = b.extent - first_b < tile.most_b ? b.extent - first_b : tile.most_b;
    return tile;
}

__device__ __forceinline__ float reciprocal(u32 words)
{
#ifdef __CUDA_ARCH__
    return __frcp_rn(float(words));
#else
    return 1.0f / float(words);
#endif
}

// The element of a word of a row. The result is exact: a row has fewer than 2^15 words, and an element at most 64, so
// that (word + 1/2) / words is at least 2^-7 from an integer, and rounding errors are below 2^14 * 2^-22.
__device__ __forceinline__ u32 element_of(u32 word, float inverse)
{
    return u32((float(word) + 0.5f) * inverse);
}

// Moves a tile word by word.
template <class Word>
__device__ __forceinline__ void move_tile(const Tile& tile)
{
    Word* const memory = (Word*)tile_memory();
    const float inverse = reciprocal(tile.words);
    const u32 words = tile.words, per_bank = sizeof(Word) < 4 ? 4 / u32(sizeof(Word)) : 1;
    const u32 pitch = sizeof(Word) < 4 ? ((tile.most_a * words + per_bank - 1) / per_bank | 1) * per_bank : (tile.most_a | 1) * words;
    u32 lanes = 1u << tile.log_a, step = blockDim.x >> tile.log_a;
    for (u32 word = threadIdx.x & (lanes - 1); word < tile.count_a * words; word += lanes) {
        const u32 element = words == 1 ? word : element_of(word, inverse);
        const u64 from = tile.source + element * tile.source_a + (word - element * words) * sizeof(Word);
        for (u32 start = threadIdx.x >> tile.log_a; start < tile.count_b; start += TILE_IN_FLIGHT * step) {
            Word taken[TILE_IN_FLIGHT] = {};
#pragma unroll
            for (u32 i = 0; i < TILE_IN_FLIGHT; ++i)
                if (start + i * step < tile.count_b)
                    taken[i] = *at_address<const Word>(from + (start + i * step) * tile.source_b);
#pragma unroll
            for (u32 i = 0; i < TILE_IN_FLIGHT; ++i)
                if (start + i * step < tile.count_b)
                    memory[(start + i * step) * pitch + word] = taken[i];
        }
    }
    __syncthreads();
    lanes = 1u << tile.log_b, step = blockDim.x >> tile.log_b;
    for (u32 word = threadIdx.x & (lanes - 1); word < tile.count_b * words; word += lanes) {
        const u32 element = words == 1 ? word : element_of(word, inverse), part = word - element * words;
        const u64 to = tile.target + element * tile.target_b + part * sizeof(Word);
        for (u32 start = threadIdx.x >> tile.log_b; start < tile.count_a; start += TILE_IN_FLIGHT * step) {
            Word taken[TILE_IN_FLIGHT] = {};
#pragma unroll
            for (u32 i = 0; i < TILE_IN_FLIGHT; ++i)
                if (start + i * step < tile.count_a)
                    taken[i] = memory[element * pitch + (start + i * step) * words + part];
#pragma unroll
            for (u32 i = 0; i < TILE_IN_FLIGHT; ++i)
                if (start + i * step < tile.count_a)
                    *at_address<Word>(to + (start + i * step) * tile.target_a) = taken[i];
        }
    }
    __syncthreads();  // before the next tile
}

// Moves a tile by SIDE words at once; both axes are contiguous, and their extents are multiples of SIDE.
template <class Word, u32 SIDE>
__device__ __forceinline__ void move_squares(const Tile& tile)
{
    typedef Group<Word, SIDE> Words;
    Words* const memory = (Words*)tile_memory();
    const u32 pitch = tile.most_a | 1, columns = tile.most_a / SIDE;
    u32 lanes = 1u << tile.log_a, step = blockDim.x >> tile.log_a;
    for (u32 column = threadIdx.x & (lanes - 1); column < tile.count_a / SIDE; column += lanes)
        for (u32 row = threadIdx.x >> tile.log_a; row < tile.count_b / SIDE; row += step) {
            Words square[SIDE];
#pragma unroll
            for (u32 i = 0; i < SIDE; ++i)
                square[i] = *at_address<const Words>(tile.source + column * sizeof(Words) + (row * SIDE + i) * tile.source_b);
            turn(square);
#pragma unroll
            for (u32 i = 0; i < SIDE; ++i)
                memory[row * pitch + i * columns + column] = square[i];
        }
    __syncthreads();
    lanes = 1u << tile.log_b, step = blockDim.x >> tile.log_b;
    for (u32 row = threadIdx.x & (lanes - 1); row < tile.count_b / SIDE; row += lanes)
        for (u32 column = threadIdx.x >> tile.log_b; column < tile.count_a / SIDE; column += step) {
            Words square[SIDE];
#pragma unroll
            for (u32 i = 0; i < SIDE; ++i)
                square[i] = memory[row * pitch + i * columns + column];
#pragma unroll
            for (u32 i = 0; i < SIDE; ++i)
                *at_address<Words>(tile.target + row * sizeof(Words) + (column * SIDE + i) * tile.target_a) = square[i];
        }
    __syncthreads();
}

// Moves a tile by squares of the region's side, or word by word.
template <class Word>
struct MoveTile {
    static __device__ __forceinline__ void run(const Tile& tile, u32) { move_tile<Word>(tile); }
};

template <class Word, u32 SIDE>
__device__ __forceinline__ bool moved_squares(const Tile& tile, u32 side)
{
    if (!(TILED & SIDE) || (TILED != SIDE && side != SIDE))
        return false;
    move_squares<Word, SIDE>(tile);
    return true;
}

template <>
struct MoveTile<unsigned char> {
    static __device__ __forceinline__ void run(const Tile& tile, u32 side)
    {
        if (!moved_squares<unsigned char, 4>(tile, side))
            move_tile<unsigned char>(tile);
    }
};

template <>
struct MoveTile<unsigned short> {
    static __device__ __forceinline__ void run(const Tile& tile, u32 side)
    {
        if (!moved_squares<unsigned short, 4>(tile, side) && !moved_squares<unsigned short, 2>(tile, side))
            move_tile<unsigned short>(tile);
    }
};

template <>
struct MoveTile<u32> {
    static __device__ __forceinline__ void run(const Tile& tile, u32 side)
    {
        if (!moved_squares<u32, 4>(tile, side) && !moved_squares<u32, 2>(tile, side))
            move_tile<u32>(tile);
    }
};

template <>
struct MoveTile<u64> {
    static __device__ __forceinline__ void run(const Tile& tile, u32 side)
    {
        if (!moved_squares<u64, 2>(tile, side))
            move_tile<u64>(tile);
    }
};

struct TileWork {
    u64 source_base, target_base;

    template <class Word>
    __device__ __forceinline__ void with(const Region& region, u32 first, u32 last) const
    {
        for (u32 number = first; number < last; ++number)
            MoveTile<Word>::run(tile_of(region, source_base, target_base, number), 1u << (region.run_bytes >> 30));
    }
};
