// Tells all ranks, this one as well, that this one cannot take part in the next launch of a reduction; see
// allreduce_body.cu. It comes in the order of the launches, so that this rank knows the epoch, and has no part any more
// in those before.
//
// Launch shape: one block.

#include "allreduce_body.cu"

extern "C" __global__ void __launch_bounds__(32) allreduce_cancel(const __grid_constant__ Allreduce p)
{
    wait_for_earlier();
    const u32 epoch = u32(load_state(p.state).count >> EPOCH_SHIFT) + 1;
    const u64 failed = p.state + 8 - p.memory[p.rank];  // where it is in each rank's memory
    for (u32 to = threadIdx.x; to < p.ranks; to += blockDim.x)
        store_packet(p.memory[to] + failed, u64(epoch) << 32 | (CANCELLED + p.rank));
}
