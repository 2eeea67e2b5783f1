// Kernels around the measuring: filling memory, keeping a stream busy, holding multiprocessors.
//
// fill       Contract: word i of `words` becomes mix(i) ^ flip, or is combined with it by exclusive or.
//            Launch:   any; a grid-stride loop. The mixture is that of reference.py.
// nothing    An empty launch.
// wait       Contract: ends `ns` nanoseconds after it began. Launch: one thread. Touches no memory, so that caches stay.
// hold       Contract: on `held` of the GPU's `sms` multiprocessors, evenly spread, both blocks that fit there stay,
//            doing arithmetic, until *stop is not 0 or `limit_ns` have passed; on the others they leave after
//            `settle_ns`, when every block has been given its place. *staying counts the blocks that stay.
//            Launch:   two blocks a multiprocessor, of half its threads, so that nothing else fits beside them.
//            Never waits for ever: the limit is the GPU's own clock's.
// turns      Contract: each block does arithmetic for `each_ns`, unless *stop is not 0.
//            Launch:   blocks of half a multiprocessor's threads, many more than fit at once.
// work       Contract: each block does `rounds` of arithmetic, as many operations whoever else runs.
//            Launch:   the same as of turns.

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

extern "C" __global__ void nothing() {}

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

static __device__ __forceinline__ float some_arithmetic(float a)
{
#pragma unroll 16
    for (int i = 0; i < 1024; ++i)
        a = a * 0.999f + 0.5f;
    return a;
}

extern "C" __global__ void __launch_bounds__(1024, 2)
    hold(const volatile int* stop, unsigned* staying, float* sink, unsigned held, unsigned sms, u64 settle_ns, u64 limit_ns)
{
    const u64 begin = clock_ns();
    while (clock_ns() - begin < settle_ns) {
    }
    unsigned sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    if ((sm + 1) * held / sms == sm * held / sms)
        return;
    if (threadIdx.x == 0)
        atomicAdd(staying, 1u);
    float a = threadIdx.x;
    int enough;
    do {
        a = some_arithmetic(a);
        // One thread looks, so that the host link stays free.
        enough = threadIdx.x == 0 && (*stop != 0 || clock_ns() - begin > limit_ns);
    } while (!__syncthreads_or(enough));
    if (a == -1.0f)
        *sink = a;
}

extern "C" __global__ void __launch_bounds__(1024, 2) work(float* sink, unsigned rounds)
{
    float a = threadIdx.x;
    for (unsigned i = 0; i < rounds; ++i)
        a = some_arithmetic(a);
    if (a == -1.0f)
        *sink = a;
}

extern "C" __global__ void __launch_bounds__(1024, 2) turns(const volatile int* stop, float* sink, u64 each_ns)
{
    if (__syncthreads_or(threadIdx.x == 0 && *stop != 0))
        return;
    const u64 begin = clock_ns();
    float a = threadIdx.x;
    while (clock_ns() - begin < each_ns)
        a = some_arithmetic(a);
    if (a == -1.0f)
        *sink = a;
}

#endif
