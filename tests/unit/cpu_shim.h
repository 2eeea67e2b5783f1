// Enough of CUDA for a g++ to compile a kernel and run it: every thread of every block, one after another.
//
// Kernels that this can run use no barrier and no shared memory. Out of order on request, because no kernel may
// depend on the order in which its threads run.
#pragma once

#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct Dim {
    unsigned x;
};

static Dim threadIdx, blockIdx, blockDim, gridDim;

static inline unsigned __umulhi(unsigned a, unsigned b)
{
    return unsigned((std::uint64_t(a) * b) >> 32);
}

static inline unsigned short add_half_on_host(unsigned short a, unsigned short b)
{
    _Float16 x, y;
    std::memcpy(&x, &a, 2);
    std::memcpy(&y, &b, 2);
    x = x + y;
    std::memcpy(&a, &x, 2);
    return a;
}

template <class Kernel, class... Args>
static void launch_on_cpu(unsigned grid, unsigned block, bool backwards, Kernel kernel, Args... args)
{
    gridDim.x = grid;
    blockDim.x = block;
    for (unsigned i = 0; i < grid; ++i) {
        blockIdx.x = backwards ? grid - 1 - i : i;
        for (unsigned j = 0; j < block; ++j) {
            threadIdx.x = backwards ? block - 1 - j : j;
            kernel(args...);
        }
    }
}
