// Kernels around the measuring: filling memory, keeping a stream busy.
//
// fill       Contract: word i of `words` becomes mix(i) ^ flip, or is combined with it by exclusive or.
//            Launch:   any; a grid-stride loop. checks.py mixes alike.
// wait       Contract: ends `ns` nanoseconds after it began. Launch: one thread. Touches no memory, so that caches stay.

#ifndef MULTIPLIER
#define MULTIPLIER 0x9E3779B97F4A7C15ull
#endif
#ifndef SHIFT
#define SHIFT 29
#endif

typedef unsigned long long u64;

extern "C" __global__ void fill(u64* words, u64 n, u64 flip, int combine)
{
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        u64 value = i * MULTIPLIER;
        value = (value ^ (value >> SHIFT)) ^ flip;
        words[i] = combine ? words[i] ^ value : value;
    }
}

#ifdef __CUDACC__

static __device__ __forceinline__ u64 clock_ns()
{
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

extern "C" __global__ void wait(u64 ns)
{
    const u64 begin = clock_ns();
    // The second bound is for clocks that stand still: some seconds at any clock rate.
    for (unsigned i = 0; clock_ns() - begin < ns && i < (1u << 28); ++i) {
    }
}

#endif
