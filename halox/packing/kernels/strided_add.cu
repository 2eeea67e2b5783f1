// strided_add: target += source over a table of regions, elements of one type, in one launch.
//
// ELEMENT is the C type of an element: double, float, Half, or an unsigned integer (also for signed integers, since
// both are added modulo 2^bits). A complex number is two elements. The planner guarantees that a word holds whole
// elements. strided_body.cu states the table, the index order and the launch shape. Bytes moved: two reads and one
// write per element. Targets of one launch must not overlap: the kernel uses no atomics, so that equal inputs give
// equal bits. The host puts overlapping regions into consecutive launches.

#include "strided_body.cu"

// IEEE half precision without cuda_fp16.h, which not every installation of NVRTC includes.
struct Half {
    unsigned short bits;
};

__device__ __forceinline__ Half operator+(Half a, Half b)
{
    Half sum;
#ifdef __CUDA_ARCH__
    asm("add.rn.f16 %0, %1, %2;" : "=h"(sum.bits) : "h"(a.bits), "h"(b.bits));
#else
    sum.bits = add_half_on_host(a.bits, b.bits);
#endif
    return sum;
}

#ifndef ELEMENT
#define ELEMENT double
#endif

struct Add {
    template <class Word>
    static __device__ __forceinline__ Word take(const Word* source, const Word* target)
    {
        union Lanes {
            Word word;
            ELEMENT element[sizeof(Word) / sizeof(ELEMENT)];
        };
        Lanes sum, addend;
        sum.word = *target;
        addend.word = *source;
#pragma unroll
        for (int i = 0; i < int(sizeof(Word) / sizeof(ELEMENT)); ++i)
            sum.element[i] = (ELEMENT)(sum.element[i] + addend.element[i]);
        return sum.word;
    }
};

// Words narrower than an element do not occur; they are left out at compile time.
template <class Word, bool holds_elements>
struct AddWords {
    static __device__ __forceinline__ void run(
        const Region& region, u64 source_base, u64 target_base, u32 first, u32 last)
    {
        move_words<Add, Word>(region, source_base, target_base, first, last);
    }
};

template <class Word>
struct AddWords<Word, false> {
    static __device__ __forceinline__ void run(const Region&, u64, u64, u32, u32) {}
};

struct AddWork {
    u64 source_base, target_base;

    template <class Word>
    __device__ __forceinline__ void with(const Region& region, u32 first, u32 last) const
    {
        AddWords<Word, (sizeof(Word) >= sizeof(ELEMENT))>::run(
            region, source_base, target_base, first, last);
    }

    __device__ __forceinline__ void operator()(const Region& region, u32 first, u32 last) const
    {
        with_word(*this, region, first, last);
    }
};

struct BasedAdd {
    const Bases& bases;

    __device__ __forceinline__ void operator()(const Region& region, u32 first, u32 last) const
    {
        AddWork{bases.of_source(region), bases.of_target(region)}(region, first, last);
    }
};

extern "C" __global__ void __launch_bounds__(MAX_THREADS) strided_add(
    const __grid_constant__ Bases bases, const __grid_constant__ Table table, u32 regions, u32 chunks, u32 chunk_words)
{
    for_each_chunk(table, regions, chunks, chunk_words, BasedAdd{bases});
}
