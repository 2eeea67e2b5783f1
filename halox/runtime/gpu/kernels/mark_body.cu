// Shared text of the kernels that leave a mark in host memory as they start: what is ahead of them has ended.
//
// Spliced in at #include "mark_body.cu", behind run_body.cu, whose types it needs; strided_body.cu has the reason.
//
// Two words: the first says that something is under way, the second that it has ended since the host looked, and set
// it back. One thread of the grid calls it. The stores are posted, so that the kernel does not wait for them.

__device__ __forceinline__ void leave_mark(u64 at, u32 is_end)
{
    volatile u32* words = at_address<volatile u32>(at);
    words[0] = !is_end;
    if (is_end)
        words[1] = 1;
}
