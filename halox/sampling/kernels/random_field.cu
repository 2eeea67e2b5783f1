// random_field: random numbers of all points of a field, each from the index of its point in the whole field.
//
// The generator is Philox4x32-10: its counter is the index, and its key the seed. Two words make a number of 53 bits.
// The points of the array are rows of equal length, in its order; the index of a point is the sum of one number for the
// row and one for the column. Numbers of TYPE have one part, or two with COMPLEX. A uniform float has 24 bits (SINGLE).
// NORMAL numbers are made from both numbers of a counter by Box-Muller.
//
// Launch shape: one dimension, a block for each row, of any number of threads. Bytes moved: each number is written once;
// a thread reads 8 bytes for it, mostly from the cache.
//
// Source: J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw: Parallel random numbers: as easy as 1, 2, 3, SC 2011.

#ifndef TYPE
#define TYPE double
#endif
#ifndef COMPLEX
#define COMPLEX 0
#endif
#ifndef NORMAL
#define NORMAL 0
#endif
#ifndef SINGLE
#define SINGLE 0
#endif

typedef unsigned u32;
typedef unsigned long long u64;

// Return a number in [0, 1) from two words.
static __device__ __forceinline__ double fraction(u32 high, u32 low)
{
    const u64 bits = (u64(high >> 5) << 26) + (low >> 6);
    return double(SINGLE && !NORMAL ? bits >> 29 << 29 : bits) * 0x1p-53;
}

extern "C" __global__ void random_field(TYPE* target, const u64* of_row, const u64* of_column, u32 columns, u64 seed)
{
    const u64 first = of_row[blockIdx.x];
    TYPE* const row = target + u64(blockIdx.x) * columns * (COMPLEX + 1);
    for (u32 column = threadIdx.x; column < columns; column += blockDim.x) {
        const u64 index = first + of_column[column];
        u32 a = u32(index), b = u32(index >> 32), c = 0, d = 0;
        u32 key = u32(seed), other = u32(seed >> 32);
#pragma unroll
        for (int round = 0; round < 10; ++round) {
            const u64 one = u64(a) * 0xD2511F53u, two = u64(c) * 0xCD9E8D57u;
            a = u32(two >> 32) ^ b ^ key;
            b = u32(two);
            c = u32(one >> 32) ^ d ^ other;
            d = u32(one);
            key += 0x9E3779B9u;
            other += 0xBB67AE85u;
        }
        double real = fraction(a, b);
        [[maybe_unused]] double imaginary = fraction(c, d);
        if (NORMAL) {
            const double radius = sqrt(-2 * log1p(-real)), angle = __dmul_rn(6.283185307179586, imaginary);
            real = radius * cos(angle);
            if (COMPLEX)
                imaginary = radius * sin(angle);
        }
        row[column * (COMPLEX + 1)] = TYPE(real);
#if COMPLEX
        row[2 * column + 1] = TYPE(imaginary);
#endif
    }
}
