// Shared text of the kernels that signal to other GPUs: single accesses to flags, packets and counts.
//
// Spliced in where a kernel says #include "signals.cu", behind run_body.cu, whose types it needs; see strided_body.cu
// for why. Only declared here for the CPU: what stands in for a GPU's memory there defines them.
//
// A flag is stored with release and loaded with acquire at system scope: whoever sees it sees what was stored before
// it, by the same thread, or by other threads of its block before a barrier. A packet is stored and loaded in one
// access of 8 or 16 bytes that cannot be torn, so that an epoch vouches for the data beside it.

// Of a plan on this GPU. `count` grows by the same amount with each launch, `failed` is set once a wait was given up.
struct __align__(16) State {
    u64 count;
    u64 failed;
};

#ifdef __CUDA_ARCH__
__device__ __forceinline__ u32 load_flag(u64 at)
{
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
__device__ __forceinline__ void store_flag(u64 at, u32 value)
{
    asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(at), "r"(value) : "memory");
}
__device__ __forceinline__ void store_loose(u64 at, u32 value)
{
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" :: "l"(at), "r"(value) : "memory");
}
__device__ __forceinline__ u32 load_loose(u64 at)
{
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
__device__ __forceinline__ State load_state(u64 at)
{
    State state;
    asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(state.count), "=l"(state.failed) : "l"(at) : "memory");
    return state;
}
__device__ __forceinline__ void load_packets(u64 at, u64& first, u64& second)
{
    asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(first), "=l"(second) : "l"(at) : "memory");
}
__device__ __forceinline__ void load_packet(u64 at, u64& packet)
{
    asm volatile("ld.volatile.global.u64 %0, [%1];" : "=l"(packet) : "l"(at) : "memory");
}
__device__ __forceinline__ void store_packets(u64 at, u64 first, u64 second)
{
    asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" :: "l"(at), "l"(first), "l"(second) : "memory");
}
__device__ __forceinline__ void store_packet(u64 at, u64 packet)
{
    asm volatile("st.volatile.global.u64 [%0], %1;" :: "l"(at), "l"(packet) : "memory");
}
__device__ __forceinline__ Word16 load_wide(u64 at)
{
    Word16 packet;
    asm volatile("{\n\t.reg .b128 packet;\n\tld.relaxed.sys.global.b128 packet, [%2];\n\tmov.b128 {%0, %1}, packet;\n\t}"
                 : "=l"(packet.low), "=l"(packet.high) : "l"(at) : "memory");
    return packet;
}
__device__ __forceinline__ void store_wide(u64 at, u64 low, u64 high)
{
    asm volatile("{\n\t.reg .b128 packet;\n\tmov.b128 packet, {%1, %2};\n\tst.relaxed.sys.global.b128 [%0], packet;\n\t}"
                 :: "l"(at), "l"(low), "l"(high) : "memory");
}
__device__ __forceinline__ u64 nanoseconds()
{
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
__device__ __forceinline__ void add_count(u64 at, u64 value)
{
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" :: "l"(at), "l"(value) : "memory");
}
// Adds, and returns what was there before; what was stored before it is seen by those who add after it.
__device__ __forceinline__ u64 take_count(u64 at, u64 value)
{
    u64 before;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(at), "l"(value) : "memory");
    return before;
}
#endif

#include "early.cu"

__device__ __forceinline__ bool reached(u64 flag, u32 epoch)
{
    return int(load_flag(flag) - epoch) >= 0;
}

__device__ __forceinline__ u64 packed_half(u32 data, u32 epoch) { return data | (u64(epoch) << 32); }
