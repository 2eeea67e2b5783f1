// walls: fills the halo beyond the walls of a grid, of up to ARRAYS fields of one type in one launch; also the halo
// on periodic axes whose cells this rank owns.
//
// Each region is a box of one array; the boxes are disjoint. A box at an edge or a corner has several rules, one for each
// side: a rule's value comes from the values of the rules before it. The values that the first of them reads are points
// inside the walls, which no thread writes. So threads run in any order.
//
// strided_body.cu describes the table of regions, the index order, the launch shape and the bytes moved; a word is a
// number, and each block has one chunk. The source of a region's points has the offsets of all rules. The extent of level
// 0 is the number of the array. Instead of word_bytes and run_bytes a region has the codes of its rules in 16 bits each,
// lowest bits first, 0 for no rule: the number of the rule, from 1, in 3 bits its kind, and in the lowest 3 bits the level
// of its layers, NO_LEVEL for one layer. Blocks wait for each line of parameters that they read, so that the first chunks
// are also beside each other, and most rules are not read.
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

enum Kind { CONSTANT, COPY, NEGATE, GRADIENT, EXTRAPOLATE, AROUND };

// The fill across one side. A layer's distance from the layer at the wall is `depth` plus its number in the region.
struct Rule {
    i64 inner;  // bytes from the layer at the wall to the layer after it
    double number[2];  // the bytes of a Number
    i64 depth;
};

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
static __device__ __forceinline__ int digit_at(const Region& region, u32 level, u32 word)
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
    const Region& region;
    u32 word, last;

    __device__ __forceinline__ u32 code(int rule) const
    {
        return ((rule < 2 ? region.word_bytes : region.run_bytes) >> 16 * (rule & 1)) & 0xffff;
    }

    __device__ __forceinline__ const Rule& rule(u32 code) const { return fills.rule[(code >> 6) - 1]; }

    __device__ __forceinline__ Number number(u32 code) const { return *(const Number*)rule(code).number; }

    // Distance of a point from the layer at the wall.
    __device__ __forceinline__ int depth(u32 code, u32 i) const
    {
        return int(rule(code).depth) + digit_at(region, code & 7, word + i * blockDim.x);
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
            const u32 code = this->code(rules - 1), kind = code >> 3 & 7;
            if (rules > 1 && !code) {
                find<rules - 1>(source, value);
                return;
            }
            if (kind == CONSTANT) {
                const Number number = this->number(code);
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
                const Number number = this->number(code);
#pragma unroll
                for (u32 i = 0; i < IN_FLIGHT; ++i)
                    value[i] = number - value[i];
            } else if (kind == GRADIENT) {
                const Number number = this->number(code);
#pragma unroll
                for (u32 i = 0; i < IN_FLIGHT; ++i)
                    value[i] = value[i] + times(number, depth(code, i));
            } else if (kind == EXTRAPOLATE) {
                u64 place[IN_FLIGHT];
                Number inner[IN_FLIGHT] = {};
#pragma unroll
                for (u32 i = 0; i < IN_FLIGHT; ++i)
                    place[i] = source[i] + rule(code).inner;
                find<rules - 1>(place, inner);
#pragma unroll
                for (u32 i = 0; i < IN_FLIGHT; ++i) {
                    const int distance = depth(code, i);
                    value[i] = value[i] + times(value[i] - inner[i], distance < 0 ? -distance : distance);
                }
            }
        }
    }
};

static __device__ __forceinline__ u32 region_at(const Fills& fills, const Table& table, u32 chunk)
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
    const __grid_constant__ Fills fills, const __grid_constant__ Table table, u32 chunk_words)
{
    wait_for_earlier();
    const Region& region = table.region[region_at(fills, table, blockIdx.x)];
    const u32 first = (blockIdx.x - region.first_chunk) * chunk_words, left = region.words - first;
    const u32 last = first + (left < chunk_words ? left : chunk_words);
    const u64 base = fills.pointers[ARRAYS > 1 ? region.level[0].extent : 0];
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
