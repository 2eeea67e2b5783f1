// look: the end of a round of a loop on the GPU (runtime/gpu/while_graph.py): counts the round, and decides whether
// the loop's graph runs another one. One thread.
//
// FLAG is the unsigned integer as wide as the flag, whose value other than 0 ends the loop. The words are the rounds so
// far, the most, and whether the host wants the loop to end; only the host writes the last two.

#ifndef FLAG
#define FLAG unsigned char
#endif

// Of CUDA's device runtime, which NVRTC does not declare.
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned value);

extern "C" __global__ void look(unsigned long long loop, const volatile FLAG* flag, volatile unsigned long long* words)
{
    const unsigned long long rounds = words[0] + 1, most = words[1], stop = words[2];
    const bool ends = *flag != 0;
    words[0] = rounds;
    cudaGraphSetConditional(loop, !ends && !stop && rounds < most);
}
