// Shared text of kernels that copy runs of bytes: a few lanes of a warp copy a run between addresses of any alignment.
//
// Kernels splice this file in at #include "run_body.cu"; strided_body.cu gives the reason. There is no barrier and no
// shuffle.
//
// copy_run moves `length` bytes from `source` to `target`, which must not overlap. `lanes` lanes call it with the same
// arguments, except for `lane`. It stores aligned words of 16, 8 or 4 bytes: the widest word whose size divides the
// difference of the two addresses. It stores single bytes before the first word and after the last word. If 4 does not
// divide the difference, each word is combined from the two aligned 4-byte words of the source that hold its bytes.
// Each of these two words holds at least one byte of the run, so that no page outside the run is touched. Bytes moved:
// each byte is read once (bytes of such words of the source may be read twice) and written once.

#ifndef RUN_IN_FLIGHT
#define RUN_IN_FLIGHT 4  // words that a lane loads before it stores the first word
#endif

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// 16 bytes that are loaded and stored in one access.
struct __align__(16) Word16 {
    u64 low, high;
};

// Pointer to an address. Device, peer and mapped host memory are global memory; device code declares the pointer
// global, so that loads and stores need no generic addressing.
template <class Word>
__device__ __forceinline__ Word* at_address(u64 address)
{
#ifdef __CUDA_ARCH__
    return (Word*)__cvta_global_to_generic(address);
#else
    return (Word*)address;
#endif
}

// The four bytes that begin `bits` bits into `low`, of the eight bytes of `low` and `high`; 0 < bits < 32.
__device__ __forceinline__ u32 between_words(u32 low, u32 high, u32 bits)
{
#ifdef __CUDA_ARCH__
    return __funnelshift_r(low, high, bits);
#else
    return (low >> bits) | (high << (32 - bits));
#endif
}

template <class Word>
__device__ __forceinline__ void copy_words(u64 source, u64 target, u32 words, u32 lane, u32 lanes)
{
    for (u32 start = lane; start < words; start += RUN_IN_FLIGHT * lanes) {
        Word taken[RUN_IN_FLIGHT] = {};  // initialized, or the words would stay in registers through all loops
#pragma unroll
        for (u32 i = 0; i < RUN_IN_FLIGHT; ++i)
            if (start + i * lanes < words)
                taken[i] = at_address<const Word>(source)[start + i * lanes];
#pragma unroll
        for (u32 i = 0; i < RUN_IN_FLIGHT; ++i)
            if (start + i * lanes < words)
                at_address<Word>(target)[start + i * lanes] = taken[i];
    }
}

// The same in words of 4 bytes, for a target at a multiple of 4 and a source that is not.
__device__ __forceinline__ void copy_shifted_words(
    u64 source, u64 target, u32 words, u32 lane, u32 lanes)
{
    const u32 bits = 8 * (u32(source) & 3);
    const u32* aligned = at_address<const u32>(source & ~u64(3));
    for (u32 start = lane; start < words; start += RUN_IN_FLIGHT * lanes) {
        u32 low[RUN_IN_FLIGHT] = {}, high[RUN_IN_FLIGHT] = {};
#pragma unroll
        for (u32 i = 0; i < RUN_IN_FLIGHT; ++i)
            if (start + i * lanes < words) {
                low[i] = aligned[start + i * lanes];
                high[i] = aligned[start + i * lanes + 1];
            }
#pragma unroll
        for (u32 i = 0; i < RUN_IN_FLIGHT; ++i)
            if (start + i * lanes < words)
                at_address<u32>(target)[start + i * lanes] = between_words(low[i], high[i], bits);
    }
}

__device__ __forceinline__ void copy_run(u64 source, u64 target, u32 length, u32 lane, u32 lanes)
{
    const u32 apart = u32(source) - u32(target);
    const u32 log = (apart & 15) == 0 ? 4 : (apart & 7) == 0 ? 3 : 2;
    const u32 before = (0u - u32(target)) & ((1u << log) - 1);
    const u32 head = before < length ? before : length;
    const u32 words = (length - head) >> log;
    const u32 body = words << log;
    const u32 edges = length - body;  // bytes before and after the words; this lane moves edge byte `lane`
    const u32 at = lane < head ? lane : lane + body;
    unsigned char edge = 0;
    if (lane < edges)
        edge = *at_address<const unsigned char>(source + at);
    if (log == 4)
        copy_words<Word16>(source + head, target + head, words, lane, lanes);
    else if (log == 3)
        copy_words<u64>(source + head, target + head, words, lane, lanes);
    else if ((apart & 3) == 0)
        copy_words<u32>(source + head, target + head, words, lane, lanes);
    else
        copy_shifted_words(source + head, target + head, words, lane, lanes);
    if (lane < edges)
        *at_address<unsigned char>(target + at) = edge;
    for (u32 n = lane + lanes; n < edges; n += lanes) {
        const u32 place = n < head ? n : n + body;
        *at_address<unsigned char>(target + place) =
            *at_address<const unsigned char>(source + place);
    }
}
