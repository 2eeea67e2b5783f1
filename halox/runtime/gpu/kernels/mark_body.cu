// Shared text of the kernels that leave a mark in host memory as they start: what is ahead of them has ended.
//
// Spliced in at #include "mark_body.cu", behind run_body.cu, whose types it needs; strided_body.cu has the reason.
//
// Four 32-bit words: the first says that something is under way, the second that it has ended since the host looked, and
// set it back. The last two are 0, or a name found in place of the one expected, and the number of its message from 1,
// stored together. The stores are posted, so that the kernel does not wait for them.

struct Mark {
    u64 words;  // 0: no mark
    u64 names;  // addresses of the messages' names
    u32 is_end, messages, name;
};

__device__ __forceinline__ u32 name_of(const Mark& mark, u32 message)
{
    return *at_address<const volatile u32>(at_address<const u64>(mark.names)[message]);
}

// Called by each thread of one block as the kernel starts; what it returns goes to `check_names` as the kernel ends, so
// that nothing waits for the loads.
__device__ __forceinline__ u32 leave_mark(const Mark& mark)
{
    if (threadIdx.x == 0) {
        volatile u32* words = at_address<volatile u32>(mark.words);
        words[0] = !mark.is_end;
        if (mark.is_end)
            words[1] = 1;
    }
    return threadIdx.x < mark.messages ? name_of(mark, threadIdx.x) : mark.name;
}

__device__ __forceinline__ void check_names(const Mark& mark, u32 found)
{
    for (u32 message = threadIdx.x;;) {
        if (found != mark.name)
            *at_address<volatile u64>(mark.words + 8) = u64(message + 1) << 32 | found;
        message += blockDim.x;
        if (message >= mark.messages)
            return;
        found = name_of(mark, message);
    }
}
