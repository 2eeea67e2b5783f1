// Shared text of kernels whose launch may begin early; see strided_body.cu for the reason.

// For launches that may begin early (runtime/gpu/launch.py): waits until the kernels ahead in the stream have
// ended and their stores are seen. Before a kernel looks at any memory; all threads of all blocks.
__device__ __forceinline__ void wait_for_earlier()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
