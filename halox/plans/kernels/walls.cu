// walls: fills the halo beyond the walls of a grid, of up to ARRAYS fields of one type in one launch; also the halo
// on periodic axes whose cells this rank owns.
//
// Each region is a box of one array; the boxes are disjoint. A box at an edge or a corner has several rules, one for each
// side: a rule's value comes from the values of the rules before it. The values that the first of them reads are points
// inside the walls, which no thread writes. So threads run in any order.
//
// A region is numbered as in strided_body.cu, which also describes the launch shape and the bytes moved; a word is a
// number, and each block has one chunk. The source of a region's points has the offsets of all rules. Blocks wait for
// each line of parameters that they read, so that the first chunks are also beside each other, a region has the kinds of
// its rules, and most rules are not read.
//
// Compiled without fused multiply-adds, so that all values have the bits that NumPy computes on the host.
//
// TYPE is the C type of a number; with COMPLEX a number consists of two. RULES is the largest number of rules of a region,
// and ARRAYS the largest number of arrays.

#ifndef TYPE
#define TYPE double
#endif
#ifndef COMPLEX
#define COMPLEX 0
#endif
#ifndef RULES
#define RULES 3
#endif

#ifndef ARRAYS
#define ARRAYS 1
#endif
// Blocks that a multiprocessor holds: as many as need no registers in memory.
#define BLOCKS (IN_FLIGHT > 2 && RULES > 3 ? 2 : COMPLEX || RULES > 3 || IN_FLIGHT > 2 ? 3 : 4)
#define INLINE_RULES 8
#define NO_LEVEL 7

#include "strided_body.cu"
#include "early.cu"

typedef unsigned short u16;

#if COMPLEX
struct Number {
    TYPE re, im;
};

static __device__ __forceinline__ Number operator+(Number a, Number b)
{
    return Number{a.re + b.re, a.im + b.im};
}

static __device__ __forceinline__ Number operator-(Number a, Number b)
{
    return Number{a.re - b.re, a.im - b.im};
}

static __device__ __forceinline__ Number times(Number a, int factor)
{
    return Number{a.re * TYPE(factor), a.im * TYPE(factor)};
}

static __device__ __forceinline__ Number negative(Number a)
{
    return Number{-a.re, -a.im};
}
#else
typedef TYPE Number;

static __device__ __forceinline__ Number times(Number a, int factor)
{
    return Number(a * Number(factor));
}

static __device__ __forceinline__ Number negative(Number a)
{
    return Number(-a);
}
#endif

enum Kind { NONE, CONSTANT, COPY, NEGATE, GRADIENT, EXTRAPOLATE, AROUND };

// The numbers of rules. A layer's distance from the layer at the wall is `depth` plus its number in the region.
struct Rule {
    i64 inner;  // bytes from the layer at the wall to the layer after it
    double number[2];  // the bytes of a Number
    i64 depth;
};

// A rule of a region; kind NONE after the last one.
struct Use {
    u16 level : 3;  // the level of the layers across the wall; NO_LEVEL for one layer
    u16 kind : 3;
    u16 rule : 10;  // its numbers, for kinds that have any
};

struct __align__(16) WallRegion {
    u64 source, target;
    u32 words, first_chunk;
    u16 array;
    Use use[RULES < 4 ? 3 : 11];  // the levels begin at a multiple of 16 bytes
    Level level[MAX_LEVELS];
};

#if TABLE_REGIONS
struct WallTable {
    WallRegion region[TABLE_REGIONS];
};
#else
struct WallTable {
    const WallRegion* region;
    const u32* chunk_region;
};
#endif

struct Fills {
#if TABLE_REGIONS
    u32 first_chunk[(TABLE_REGIONS + 1) / 2 * 2];  // of each region; the greatest number if there is none
#endif
    u64 pointers[ARRAYS];
#if TABLE_REGIONS
    Rule rule[INLINE_RULES];
#else
    const Rule* rule;
#endif
};

// Digit of a word at a level, 0 at NO_LEVEL.
static __device__ __forceinline__ int digit_at(const WallRegion& region, u32 level, u32 word)
{
    u32 found = 0;
#pragma unroll
    for (u32 k = 0; k < MAX_LEVELS; ++k) {
        const u32 above = __umulhi(word, region.level[k].magic) >> region.level[k].shift;
        if (k == level)
            found = word - above * region.level[k].count;
        word = above;
    }
    return int(found);
}

// IN_FLIGHT points of a region: the words `word`, `word + blockDim.x`, ... below `last`.
struct Points {
    const Fills& fills;
    const WallRegion& region;
    u32 word, last;

    __device__ __forceinline__ const Rule& rule(int n) const { return fills.rule[region.use[n].rule]; }

    __device__ __forceinline__ Number number(int n) const { return *(const Number*)rule(n).number; }

    // Distance of a point from the layer at the wall.
    __device__ __forceinline__ int depth(int n, u32 i) const
    {
        return int(rule(n).depth) + digit_at(region, region.use[n].level, word + i * blockDim.x);
    }

    // The values of the points by the first `rules` rules, from their sources.
    template <int rules>
    __device__ __forceinline__ void find(const u64 (&source)[IN_FLIGHT], Number (&value)[IN_FLIGHT]) const
    {
        if constexpr (rules == 0) {
#pragma unroll
            for (u32 i = 0; i < IN_FLIGHT; ++i)
                if (word + i * blockDim.x < last)
                    value[i] = *at_address<const Number>(source[i]);
        } else {
            const int n = rules - 1;
            const u32 kind = region.use[n].kind;
            if (rules > 1 && kind == NONE) {
                find<rules - 1>(source, value);
                return;
            }
            if (kind == CONSTANT) {
                const Number number = this->number(n);
#pragma unroll
                for (u32 i = 0; i < IN_FLIGHT; ++i)
                    value[i] = number;
                return;
            }
            find<rules - 1>(source, value);
            if (kind == NEGATE) {
#pragma unroll
                for (u32 i = 0; i < IN_FLIGHT; ++i)
                    value[i] = negative(value[i]);
            } else if (kind == AROUND) {
                const Number number = this->number(n);
#pragma unroll
                for (u32 i = 0; i < IN_FLIGHT; ++i)
                    value[i] = number - value[i];
            } else if (kind == GRADIENT) {
                const Number number = this->number(n);
#pragma unroll
                for (u32 i = 0; i < IN_FLIGHT; ++i)
                    value[i] = value[i] + times(number, depth(n, i));
            } else if (kind == EXTRAPOLATE) {
                u64 place[IN_FLIGHT];
                Number inner[IN_FLIGHT] = {};
#pragma unroll
                for (u32 i = 0; i < IN_FLIGHT; ++i)
                    place[i] = source[i] + rule(n).inner;
                find<rules - 1>(place, inner);
#pragma unroll
                for (u32 i = 0; i < IN_FLIGHT; ++i) {
                    const int distance = depth(n, i);
                    value[i] = value[i] + times(value[i] - inner[i], distance < 0 ? -distance : distance);
                }
            }
        }
    }
};

static __device__ __forceinline__ u32 region_at(const Fills& fills, const WallTable& table, u32 chunk)
{
#if TABLE_REGIONS
    (void)table;
    u32 found = 0;
#pragma unroll
    for (u32 k = 1; k < TABLE_REGIONS; ++k)
        found += fills.first_chunk[k] <= chunk;
    return found;
#else
    (void)fills;
    return table.chunk_region[chunk];
#endif
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, BLOCKS) fill_walls(
    const __grid_constant__ Fills fills, const __grid_constant__ WallTable table, u32 chunk_words)
{
    wait_for_earlier();
    const WallRegion& region = table.region[region_at(fills, table, blockIdx.x)];
    const u32 first = (blockIdx.x - region.first_chunk) * chunk_words, left = region.words - first;
    const u32 last = first + (left < chunk_words ? left : chunk_words);
    const u64 base = fills.pointers[ARRAYS > 1 ? region.array : 0];
    for (u32 start = first + threadIdx.x; start < last; start += IN_FLIGHT * blockDim.x) {
        u64 source[IN_FLIGHT], target[IN_FLIGHT];
        Number value[IN_FLIGHT] = {};
        places<IN_FLIGHT>(region, base, base, start, blockDim.x, source, target);
        Points{fills, region, start, last}.find<RULES>(source, value);
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; ++i)
            if (start + i * blockDim.x < last)
                *at_address<Number>(target[i]) = value[i];
    }
}
