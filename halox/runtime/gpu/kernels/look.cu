// look: the end of a round of a loop on the GPU (runtime/gpu/while_graph.py). Counts the round, and decides whether the
// graph runs another one. One thread. FLAG is an unsigned integer as wide as the flag, which ends the loop if it is not
// 0. The words are the rounds so far, the most, and whether the host ends the loop.

#include "early.cu"

// Of CUDA's device runtime; NVRTC does not declare it.
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned value);

extern "C" __global__ void look(unsigned long long loop, const volatile FLAG* flag, volatile unsigned long long* words)
{
    wait_for_earlier();
    const unsigned long long rounds = words[0] + 1, most = words[1], stop = words[2];
    const bool ends = *flag != 0;
    words[0] = rounds;
    cudaGraphSetConditional(loop, !ends && !stop && rounds < most);
}
