// walls: fills the halo beyond the walls of a grid, of up to MOST_ARRAYS fields of one type in one launch.
//
// Each region is a box of one array; the boxes are disjoint. A box at an edge or a corner has several rules, one for each
// wall: a rule's value comes from the values of the rules before it. The values that the last of them read are points
// inside the walls, which no thread writes. So threads run in any order. Each region has its own blocks, from its
// first_block on; a block's threads take the points of the region in turn, the last axis first.
//
// TYPE is the C type of a number; with COMPLEX a number consists of two. SIGNED is 0 for unsigned integers and bytes,
// which are only copied or set.

#ifndef TYPE
#define TYPE double
#endif
#ifndef COMPLEX
#define COMPLEX 0
#endif
#ifndef SIGNED
#define SIGNED 1
#endif

#define MOST_ARRAYS 16
#define MOST_AXES 8
#define MOST_RULES 4

typedef long long i64;
typedef unsigned long long u64;

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

static __device__ __forceinline__ Number times(Number a, i64 factor)
{
    return Number{a.re * TYPE(factor), a.im * TYPE(factor)};
}

static __device__ __forceinline__ Number negative(Number a)
{
    return Number{-a.re, -a.im};
}
#else
typedef TYPE Number;

#if SIGNED
static __device__ __forceinline__ Number times(Number a, i64 factor)
{
    return Number(a * Number(factor));
}

static __device__ __forceinline__ Number negative(Number a)
{
    return Number(-a);
}
#endif
#endif

enum Kind { CONSTANT, COPY, NEGATE, GRADIENT, EXTRAPOLATE, AROUND };

// The fill of a wall along its axis, for the layer with index n of the box: offsets are bytes from the layer with
// index 0, to source + step * n and to inner; depth + n is the layer's distance from the layer at the wall. The axis is -1
// if the box has one layer.
struct Rule {
    i64 axis, kind, source, step, inner, depth;
    double number[2];  // the bytes of a Number
};

struct Region {
    i64 array, first_block, base, count, axes, rules;
    i64 extents[MOST_AXES], strides[MOST_AXES];  // strides in bytes
    Rule rule[MOST_RULES];
};

struct Arrays {
    u64 pointers[MOST_ARRAYS];
};

// The value of a point by the first `rules` rules, from the address `at` of the point whose coordinates across their walls
// are 0, and the coordinates `across` the walls.
template <int rules>
struct Value {
    static __device__ __forceinline__ Number of(const Region& region, const unsigned* across,
                                                const char* at)
    {
        if (rules > region.rules)
            return Value<rules - 1>::of(region, across, at);
        const Rule& rule = region.rule[rules - 1];
        if (rule.kind == CONSTANT)
            return *(const Number*)rule.number;
        const i64 n = across[rules - 1];
        const Number value = Value<rules - 1>::of(region, across, at + rule.source + rule.step * n);
#if SIGNED
        const i64 depth = rule.depth + n;
        if (rule.kind == NEGATE)
            return negative(value);
        if (rule.kind == AROUND)
            return *(const Number*)rule.number - value;
        if (rule.kind == GRADIENT)
            return value + times(*(const Number*)rule.number, depth);
        if (rule.kind == EXTRAPOLATE) {
            const Number inner = Value<rules - 1>::of(region, across, at + rule.inner);
            return value + times(value - inner, depth < 0 ? -depth : depth);
        }
#endif
        return value;
    }
};

template <>
struct Value<0> {
    static __device__ __forceinline__ Number of(const Region&, const unsigned*, const char* at)
    {
        return *(const Number*)at;
    }
};

extern "C" __global__ void fill_walls(const __grid_constant__ Arrays arrays, const Region* table,
                                      unsigned regions)
{
    unsigned mine = 0;
    while (mine + 1 < regions && table[mine + 1].first_block <= blockIdx.x)
        ++mine;
    const Region& region = table[mine];
    const unsigned first = unsigned(region.first_block);
    const unsigned end = mine + 1 < regions ? unsigned(table[mine + 1].first_block) : gridDim.x;
    char* const base = (char*)arrays.pointers[region.array] + region.base;
    for (u64 k = u64(blockIdx.x - first) * blockDim.x + threadIdx.x; k < u64(region.count);
         k += u64(end - first) * blockDim.x) {
        unsigned across[MOST_RULES] = {};
        unsigned rest = unsigned(k);
        i64 target = 0, inside = 0;
#pragma unroll
        for (int axis = MOST_AXES - 1; axis >= 0; --axis) {
            if (axis >= region.axes)
                continue;
            const unsigned extent = unsigned(region.extents[axis]), index = rest % extent;
            rest /= extent;
            const i64 offset = index * region.strides[axis];
            bool is_across = false;
#pragma unroll
            for (int n = 0; n < MOST_RULES; ++n)
                if (n < region.rules && region.rule[n].axis == axis) {
                    across[n] = index;
                    is_across = true;
                }
            target += offset;
            if (!is_across)
                inside += offset;
        }
        *(Number*)(base + target) = Value<MOST_RULES>::of(region, across, base + inside);
    }
}
