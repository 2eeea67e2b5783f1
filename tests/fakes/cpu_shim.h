// Enough of CUDA for g++ to compile a kernel and to run all threads of all blocks, one after another.
//
// The order can be reversed, since no kernel may depend on the order of its threads. launch_on_cpu runs kernels without
// barriers. launch_with_barriers runs kernels with barriers: each thread of a block is a fiber, and __syncthreads()
// switches to the next fiber.
#pragma once

#include "cpu_standard.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
// thread_local is right for shared memory: the fibers of a block run on one CPU thread, and blocks run one after
// another.
#define __shared__ thread_local
#define __restrict__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct Dim {
    unsigned x, y, z;
};

static Dim threadIdx, blockIdx, blockDim = {1, 1, 1}, gridDim = {1, 1, 1};

static inline unsigned __umulhi(unsigned a, unsigned b)
{
    return unsigned((std::uint64_t(a) * b) >> 32);
}

static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}

static inline long long __double_as_longlong(double x)
{
    long long bits;
    std::memcpy(&bits, &x, 8);
    return bits;
}

static inline double __longlong_as_double(long long bits)
{
    double x;
    std::memcpy(&x, &bits, 8);
    return x;
}

static inline float __fmul_rn(float a, float b) { return a * b; }
static inline double __dmul_rn(double a, double b) { return a * b; }

static inline int __clzll(long long bits) { return bits ? __builtin_clzll((unsigned long long)bits) : 64; }

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

// A fiber is made once, and then runs its thread of one block after another. It is entered and left by _longjmp, since
// swapcontext makes a system call each time.
struct Fiber {
    ucontext_t context;
    jmp_buf place;
    unsigned barriers;  // in this block
    bool started, finished;
};

static struct {
    std::function<void()> kernel;
    std::vector<Fiber> fibers;
    std::vector<char> stacks;
    jmp_buf between;
    unsigned running;
    bool in_block;
    bool votes[2];  // votes at the next barrier and at the previous one
    bool has_votes, has_none;
} the_block;

[[noreturn]] static inline void fail_on_cpu(const char* why)
{
    std::fprintf(stderr, "cpu_shim.h: %s\n", why);
    std::abort();
}

static inline void leave(Fiber& fiber)
{
    if (!_setjmp(fiber.place))
        _longjmp(the_block.between, 1);
}

static inline void wait_for_the_block()
{
    if (!the_block.in_block)
        fail_on_cpu("a kernel with barriers needs launch_with_barriers");
    Fiber& fiber = the_block.fibers[the_block.running];
    ++fiber.barriers;
    leave(fiber);
}

[[maybe_unused]] static void __syncthreads()
{
    the_block.has_none = true;
    wait_for_the_block();
}

[[maybe_unused]] static int __syncthreads_or(int mine)
{
    the_block.has_votes = true;
    bool& vote = the_block.votes[the_block.fibers[the_block.running].barriers & 1];
    vote |= mine != 0;
    wait_for_the_block();
    return vote;
}

static inline void run_fiber()
{
    for (;;) {
        the_block.kernel();
        Fiber& fiber = the_block.fibers[the_block.running];
        fiber.finished = true;
        leave(fiber);
    }
}

static inline void make_fibers(unsigned threads)
{
    const std::size_t stack_bytes = 64 << 10;
    the_block.fibers.resize(threads);
    the_block.stacks.resize(threads * stack_bytes);
    for (unsigned j = 0; j < threads; ++j) {
        Fiber& fiber = the_block.fibers[j];
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = the_block.stacks.data() + j * stack_bytes;
        fiber.context.uc_stack.ss_size = stack_bytes;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, run_fiber, 0);
        fiber.started = false;
    }
}

static inline void enter(Fiber& fiber)
{
    if (_setjmp(the_block.between))
        return;
    if (fiber.started)
        _longjmp(fiber.place, 1);
    fiber.started = true;
    setcontext(&fiber.context);
}

// Runs the threads of the current block from barrier to barrier.
static inline void run_block(unsigned threads, bool backwards)
{
    if (the_block.fibers.size() < threads)
        make_fibers(threads);
    the_block.in_block = true;
    for (unsigned j = 0; j < threads; ++j) {
        the_block.fibers[j].barriers = 0;
        the_block.fibers[j].finished = false;
    }
    for (unsigned finished = 0, barriers = 0; finished < threads; ++barriers) {
        finished = 0;
        the_block.votes[barriers & 1] = the_block.has_votes = the_block.has_none = false;
        for (unsigned j = 0; j < threads; ++j) {
            the_block.running = backwards ? threads - 1 - j : j;
            threadIdx.x = the_block.running;
            enter(the_block.fibers[the_block.running]);
            finished += the_block.fibers[the_block.running].finished;
        }
        if (finished && finished < threads)
            fail_on_cpu("some threads of a block wait at a barrier that others never reach");
        if (the_block.has_votes && the_block.has_none)
            fail_on_cpu("the threads of a block wait at different barriers");
    }
    the_block.in_block = false;
}

template <class Kernel, class... Args>
static void launch_with_barriers(unsigned grid, unsigned block, bool backwards, Kernel kernel, const Args&... args)
{
    the_block.kernel = [&] { kernel(args...); };
    gridDim.x = grid;
    blockDim.x = block;
    for (unsigned i = 0; i < grid; ++i) {
        blockIdx.x = backwards ? grid - 1 - i : i;
        run_block(block, backwards);
    }
    the_block.kernel = nullptr;
}
