// A reproducible field reduction in one launch: the exact sum of the addends of all ranks' cells, rounded once.
//
// The result is the double nearest to the sum (ties to even). So its bits depend on no order, no launch shape and no
// number of ranks. A cell has ADDENDS addends in each of PARTS sums, each one rounded to double by LOCAL::of.
//
// A sum is a whole number of units of 2^-1074. It is kept as WORDS words: BINS bins of 64 bits with weights of
// 2^(BIN_BITS * i) units, and the numbers of +inf, -inf and NaN. Bins are signed and may overlap. Two sums are added word
// by word, in any order. `balanced` carries, so that each bin but the last is at most 2^(BIN_BITS - 1), plus a little
// that the last carry adds. Then the highest bin that is not 0 has the sign of the sum.
//
// A thread splits each addend x into three slices, which it adds to three doubles in registers. Slice k has the unit u
// of bin `bin - k`, and its double S is within 2^51 u of 1.5 * 2^52 u, where doubles are the multiples of u. So
// `S + x` rounds x to a multiple of u, `(S + x) - S` is that multiple, and the rest of x is at most u / 2; the last two
// are exact. The bits of S count the units that have been added. With |x| < 2^BIN_BITS u, ROOM addends keep S within its
// bounds. A thread opens higher bins when an addend is too large. It splits rests of the third slice in the same way,
// with bins of their own. It adds what remains of them, and addends beyond LAST_BIN, to the bins as integers.
//
// LOCAL Words: the source of the region is the words of a sum of this rank, and there is one block. FINISH Words: the
// words of the sum are stored, without other ranks.
//
// Launch shape: one dimension, at least 32 * PARTS threads, any number of blocks, at most 2^21 cells a block on average. A
// block adds its threads' slices to words in shared memory. If there are several blocks, it adds these to the words at
// `partials.at`, which are 0 between launches, and the last block to do so takes them. It exchanges packets of words with
// the other ranks, and rounds.
//
// Bytes moved: each cell is read once.

#ifndef PARTS
#define PARTS 1
#endif
#ifndef ADDENDS
#define ADDENDS 1
#endif

#include "field_body.cu"

#define BIN_BITS 40
#define BINS 54
#define WORDS (BINS + 3)
#define SIZE (PARTS * WORDS)
#define LAST_BIN 51  // of slices: doubles near 1.5 * 2^52 of its units are finite
#define SLICES 3
#define ROOM 2047
#ifdef INPUTS
#define SOURCE 0  // LOCAL Words is not for expressions
#else
#define SOURCE cells.source
#endif
#define TAKEN (IN_FLIGHT * ADDENDS)

__device__ __forceinline__ u64 bits_of(double x) { return u64(__double_as_longlong(x)); }
__device__ __forceinline__ double of_bits(u64 bits) { return __longlong_as_double(i64(bits)); }

typedef double Addends[PARTS][ADDENDS];

struct Words {
    static constexpr bool is_words = true;
    template <class T>
    static __device__ __forceinline__ void of(T, u64, Addends&) {}
    static __device__ __forceinline__ double of(double a) { return a; }
};

struct Number {
    static constexpr bool is_words = false;
};

struct Value : Number {
    template <class T>
    static __device__ __forceinline__ void of(T cell, u64, Addends& to) { to[0][0] = double(cell); }
    template <class T>
    static __device__ __forceinline__ void of(Complex<T> cell, u64, Addends& to)
    {
        to[0][0] = double(cell.real);
        to[PARTS - 1][0] = double(cell.imag);
    }
};

// Addends of conj(a) * b. No product is part of a fused multiply-add, which would not round it.
template <class T>
__device__ __forceinline__ void multiply(T a, T b, Addends& to) { to[0][0] = __dmul_rn(double(a), double(b)); }
template <class T>
__device__ __forceinline__ void multiply(Complex<T> a, Complex<T> b, Addends& to)
{
    to[0][0] = __dmul_rn(a.real, b.real);
    to[0][ADDENDS - 1] = __dmul_rn(a.imag, b.imag);
    if (PARTS == 2) {
        to[PARTS - 1][0] = __dmul_rn(a.real, b.imag);
        to[PARTS - 1][ADDENDS - 1] = -__dmul_rn(a.imag, b.real);
    }
}

struct Square : Number {
    template <class T>
    static __device__ __forceinline__ void of(T cell, u64, Addends& to) { multiply(cell, cell, to); }
};

struct Product : Number {
    template <class T>
    static __device__ __forceinline__ void of(T cell, u64 other, Addends& to) { multiply(cell, *at_address<const T>(other), to); }
};

struct Plain : Number {
    static __device__ __forceinline__ double of(double a) { return a; }
};

struct Root : Number {
    static __device__ __forceinline__ double of(double a) { return sqrt(a); }
};

__device__ __forceinline__ void add_word(u64* words, u32 number, u64 value)
{
    if (value)
        atomicAdd(words + number, value);
}

// Adds any double to the words of a sum as an integer.
__device__ __forceinline__ void add_double(u64* words, double x)
{
    const u64 bits = bits_of(x);
    const u32 exponent = u32(bits >> 52) & 0x7ff;
    u64 mantissa = bits & ((u64(1) << 52) - 1);
    const bool is_negative = bits >> 63;
    if (exponent == 0x7ff) {
        add_word(words, BINS + (mantissa ? 2 : is_negative), 1);
        return;
    }
    mantissa |= u64(exponent != 0) << 52;
    const u32 place = exponent ? exponent - 1 : 0, bin = place / BIN_BITS, shift = place % BIN_BITS;
    const u64 mask = (u64(1) << BIN_BITS) - 1, sign = is_negative ? ~u64(0) : 0;
    const u64 digit[3] = {
        mantissa << shift & mask, mantissa >> (BIN_BITS - shift) & mask,
        2 * BIN_BITS - shift < 53 ? mantissa >> (2 * BIN_BITS - shift) : 0};
#pragma unroll
    for (u32 i = 0; i < 3; ++i)
        add_word(words, bin + i, (digit[i] ^ sign) - sign);
}

__device__ __forceinline__ u64 carry_of(u64 word) { return u64((i64(word) + (i64(1) << (BIN_BITS - 1))) >> BIN_BITS); }

// The words of all sums after one carry from each bin to the next.
__device__ __forceinline__ u64 balanced(const u64* words, u32 number)
{
    const u32 bin = number % WORDS;
    u64 value = words[number];
    if (bin < BINS - 1)
        value -= carry_of(value) << BIN_BITS;
    if (bin > 0 && bin < BINS)
        value += carry_of(words[number - 1]);
    return value;
}

struct Slices {
    double sum[SLICES];
    u32 limit;  // upper half of the least double that is too large
    u32 bin;

    static __device__ __forceinline__ u64 start_of(u32 bin) { return u64(BIN_BITS * bin + 1) << 52 | u64(1) << 51; }

    // Opens the bins up to `to`, at least the third bin.
    __device__ __forceinline__ void open(u32 to)
    {
        bin = to;
        limit = (BIN_BITS * bin - 11) << 20;
#pragma unroll
        for (u32 k = 0; k < SLICES; ++k)
            sum[k] = of_bits(start_of(bin - k));
    }

    static __device__ __forceinline__ void add_units(u64* words, u32 number, u64 count)
    {
        const u64 carry = carry_of(count);
        add_word(words, number, count - (carry << BIN_BITS));
        add_word(words, number + 1, carry);
    }

    // Moves what has been added to the words; the slices are then empty.
    __device__ __forceinline__ void flush(u64* words)
    {
#pragma unroll
        for (u32 k = 0; k < SLICES; ++k) {
            add_units(words, bin - k, bits_of(sum[k]) - start_of(bin - k));
            sum[k] = of_bits(start_of(bin - k));
        }
    }

    // The same for all threads of a warp, which call it together: one thread adds the sums of those with the highest
    // bins, since additions to one word of shared memory wait for one another.
    __device__ __forceinline__ void flush_warp(u64* words)
    {
#ifdef __CUDA_ARCH__
        bool is_used = false;
#pragma unroll
        for (u32 k = 0; k < SLICES; ++k)
            is_used |= bits_of(sum[k]) != start_of(bin - k);
        if (!__any_sync(~0u, is_used))
            return;
        u32 highest = bin;
#pragma unroll
        for (u32 apart = 16; apart; apart /= 2)
            highest = max(highest, __shfl_xor_sync(~0u, highest, apart));
        if (bin != highest)
            flush(words);
#pragma unroll
        for (u32 k = 0; k < SLICES; ++k) {
            u64 count = bits_of(sum[k]) - start_of(bin - k);
#pragma unroll
            for (u32 apart = 16; apart; apart /= 2)
                count += __shfl_xor_sync(~0u, count, apart);
            if (threadIdx.x % 32 == 0)
                add_units(words, highest - k, count);
        }
#else
        flush(words);
#endif
    }

    // Adds addends, of which it leaves the rests; returns whether there is any.
    __device__ __forceinline__ bool take(u64* words, double (&x)[TAKEN])
    {
        u32 largest = 0;
#pragma unroll
        for (u32 i = 0; i < TAKEN; ++i)
            largest = max(largest, upper_half(x[i]));
        if (largest >= limit)
            make_way(words, x);
        bool is_rest = false;
#pragma unroll
        for (u32 i = 0; i < TAKEN; ++i) {
#pragma unroll
            for (u32 k = 0; k < SLICES; ++k) {
                const double next = sum[k] + x[i];
                x[i] -= next - sum[k];
                sum[k] = next;
            }
            is_rest |= x[i] != 0;
        }
        return is_rest;
    }

    // Opens the bins of the largest addend. Adds those that are beyond the last bin, infinite or NaN to the words.
    __device__ __forceinline__ void make_way(u64* words, double (&x)[TAKEN])
    {
        u32 largest = 0;
#pragma unroll
        for (u32 i = 0; i < TAKEN; ++i) {
            if (upper_half(x[i]) >= (BIN_BITS * LAST_BIN - 11) << 20) {
                add_double(words, x[i]);
                x[i] = 0;
            }
            largest = max(largest, upper_half(x[i]));
        }
        if (largest >= limit) {
            flush(words);
            open(((largest >> 20) + 51) / BIN_BITS);
        }
    }

    static __device__ __forceinline__ u32 upper_half(double x) { return u32(bits_of(x) >> 32) & 0x7fffffffu; }
    static __device__ __forceinline__ u32 max(u32 a, u32 b) { return a > b ? a : b; }
};

__device__ __forceinline__ void add_cells(const Cells& cells, u64* words)
{
    Slices slices[PARTS], of_rests[PARTS];
#pragma unroll
    for (u32 part = 0; part < PARTS; ++part) {
        slices[part].open(SLICES - 1);
        of_rests[part].open(SLICES - 1);
    }
    u32 room = ROOM;
    for_each_batch(cells, [&](const Cell (&cell)[IN_FLIGHT], const bool (&has)[IN_FLIGHT]) {
        double x[PARTS][TAKEN] = {};
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; ++i)
            if (has[i]) {
                Addends addends = {};
#ifdef INPUTS
                const Cell& in = cell[i];
                STEPS
                LOCAL::of(RESULTS_OF(VALUE_OF), u64(0), addends);
#else
                LOCAL::of(cell[i].value, cell[i].other, addends);
#endif
#pragma unroll
                for (u32 j = 0; j < PARTS * ADDENDS; ++j)
                    x[j / ADDENDS][i * ADDENDS + j % ADDENDS] = addends[j / ADDENDS][j % ADDENDS];
            }
        const bool is_full = room < TAKEN;
        room = (is_full ? ROOM : room) - TAKEN;
#pragma unroll
        for (u32 part = 0; part < PARTS; ++part) {
            u64* const to = words + part * WORDS;
            if (is_full) {
                slices[part].flush(to);
                of_rests[part].flush(to);
            }
            if (slices[part].take(to, x[part]) && of_rests[part].take(to, x[part]))
#pragma unroll
                for (u32 i = 0; i < TAKEN; ++i)
                    add_double(to, x[part][i]);
        }
    });
#pragma unroll
    for (u32 part = 0; part < PARTS; ++part) {
        slices[part].flush_warp(words + part * WORDS);
        of_rests[part].flush_warp(words + part * WORDS);
    }
}

// Adds the words of all ranks to `total`, which has this rank's words; false if a word did not arrive.
__device__ __forceinline__ bool combine_ranks(const Allreduce& p, u32 epoch, const u64* mine, u64* total)
{
    const u64 at = (epoch & 1) * p.slot_bytes;
    const u32 packets = p.ranks * SIZE;
    for (u32 i = threadIdx.x; i < packets; i += blockDim.x)
        if (i / SIZE != p.rank) {
            Unit<double> unit;
            unit.word[0] = balanced(mine, i % SIZE);
            send_unit(p.memory[i / SIZE] + at + p.rank * p.rank_bytes + i % SIZE * unit_bytes<double>, unit, epoch);
        }
    u32 i = threadIdx.x;
    return wait(p, epoch, [&] {
        for (; i < packets; i += blockDim.x) {
            Unit<double> came;
            if (i / SIZE == p.rank)
                continue;
            if (!take_unit(p.memory[p.rank] + at + i / SIZE * p.rank_bytes + i % SIZE * unit_bytes<double>, came, epoch))
                return i / SIZE + 1;
            add_word(total, i % SIZE, came.word[0]);
        }
        return 0u;
    });
}

// The double nearest to a sum whose words are balanced. `high` is the highest bin that is not 0, plus 1; `tail` is the
// highest of the bins more than two below it. Both are 0 if there is none.
__device__ __forceinline__ double rounded(const u64* words, u32 high, u32 tail)
{
    const u64 infinity = u64(0x7ff) << 52;
    if (words[BINS + 2] || (words[BINS] && words[BINS + 1]))
        return of_bits(infinity | u64(1) << 51);
    if (words[BINS] || words[BINS + 1])
        return of_bits(infinity | u64(words[BINS] == 0) << 63);
    if (!high)
        return 0;
    const u32 base = high > 3 ? high - 3 : 0;
    const bool is_negative = i64(words[high - 1]) < 0;
    const u64 sign = is_negative ? ~u64(0) : 0;
    const u64 first = (words[base] ^ sign) - sign, second = (words[base + 1] ^ sign) - sign;
    const u64 third = (words[base + 2] ^ sign) - sign;
    // The absolute value of the three bins, in 128 bits; less 1 if the tail, which is less than 1, has the other sign.
    u64 low = first + (second << BIN_BITS);
    u64 upper = u64(i64(first) >> 63) + u64(i64(second) >> (64 - BIN_BITS)) + (third << (2 * BIN_BITS - 64)) + (low < first);
    if (tail && (i64(words[tail - 1]) < 0) != is_negative)
        upper -= low-- == 0;
    const u32 zeros = upper ? __clzll(i64(upper)) : 64 + __clzll(i64(low));
    const u32 place = 127 - zeros + BIN_BITS * base;  // of the highest bit, in units of the sum
    u64 bits = low;  // a multiple of the least subnormal number is its bits
    if (place > 52) {
        if (zeros >= 64) {
            upper = low << (zeros - 64);
            low = 0;
        } else if (zeros) {
            upper = upper << zeros | low >> (64 - zeros);
            low <<= zeros;
        }
        const u64 mantissa = upper >> 11, rest = upper & 2047;
        const bool is_up = rest > 1024 || (rest == 1024 && (low || tail || (mantissa & 1)));
        bits = (u64(place - 52) << 52) + mantissa + is_up;
        bits = place > 2097 ? infinity : bits;
    }
    return of_bits(bits | u64(is_negative) << 63);
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 4 / PARTS) exact_field(
    const __grid_constant__ Cells cells, const __grid_constant__ Partials partials, const __grid_constant__ Allreduce p)
{
    __shared__ u64 words[SIZE], total[SIZE];
    __shared__ u32 high[PARTS], tail[PARTS];
    wait_for_earlier();
    if (threadIdx.x < PARTS)
        high[threadIdx.x] = tail[threadIdx.x] = 0;
    for (u32 i = threadIdx.x; i < SIZE; i += blockDim.x)
        words[i] = LOCAL::is_words ? at_address<const u64>(SOURCE)[i] : 0;
    __syncthreads();
    if (!LOCAL::is_words)
        add_cells(cells, words);
    __syncthreads();
    if (gridDim.x > 1)
        for (u32 i = threadIdx.x; i < SIZE; i += blockDim.x)
            if (const u64 value = balanced(words, i))
                add_count(partials.at + 8 * i, value);
    __syncthreads();
    const Turn turn = take_turn(p, gridDim.x);  // also signals that this block's words are added
    if (turn.number != gridDim.x - 1)
        return;
    for (u32 i = threadIdx.x; i < SIZE && gridDim.x > 1; i += blockDim.x) {
        words[i] = at_address<u64>(partials.at)[i];
        at_address<u64>(partials.at)[i] = 0;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < SIZE; i += blockDim.x)
        total[i] = balanced(words, i);
    __syncthreads();
    if (FINISH::is_words) {
        for (u32 i = threadIdx.x; i < SIZE; i += blockDim.x)
            at_address<u64>(p.target)[i] = total[i];
        return;
    }
    if (!combine_ranks(p, turn.epoch, words, total))
        return;
    for (u32 i = threadIdx.x; i < SIZE; i += blockDim.x)
        words[i] = balanced(total, i);
    __syncthreads();
    for (u32 i = threadIdx.x; i < SIZE; i += blockDim.x)
        if (i % WORDS < BINS && words[i])
            atomicMax(high + i / WORDS, i % WORDS + 1);
    __syncthreads();
    for (u32 i = threadIdx.x; i < SIZE; i += blockDim.x)
        if (i % WORDS + 3 < high[i / WORDS] && words[i])
            atomicMax(tail + i / WORDS, i % WORDS + 1);
    __syncthreads();
    const u32 part = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0 && part < PARTS)
        at_address<double>(p.target)[part] = FINISH::of(rounded(words + part * WORDS, high[part], tail[part]));
}
