// outside: the rows of the positions outside of a block of cells, or not finite, in no particular order.
//
// A position x is in the block if low <= x + 1/2 < high along each axis. The rows are appended to a list, whose length is
// `count`: a block of threads first collects its rows in shared memory, and then adds to the length once.
//
// Launch shape: one dimension, THREADS * ROWS positions for each block. Bytes moved: each position is read once.

#ifndef AXES
#define AXES 3
#endif
#ifndef THREADS
#define THREADS 256
#endif
#ifndef ROWS
#define ROWS 8
#endif

struct Block {
    double low[AXES], high[AXES];
};

extern "C" __global__ void outside(const double* positions, long long n, const Block block, long long* rows,
                                   unsigned long long* count)
{
    __shared__ unsigned found, list[THREADS * ROWS];
    __shared__ unsigned long long place;
    const long long first = (long long)blockIdx.x * (THREADS * ROWS);
    if (threadIdx.x == 0)
        found = 0;
    __syncthreads();
#pragma unroll
    for (unsigned row = threadIdx.x; row < THREADS * ROWS; row += THREADS) {
        bool is_inside = true;
        for (int axis = 0; axis < AXES && first + row < n; ++axis) {
            const double x = positions[(first + row) * AXES + axis] + 0.5;
            is_inside = is_inside && x >= block.low[axis] && x < block.high[axis];
        }
        if (!is_inside)
            list[atomicAdd(&found, 1u)] = row;
    }
    __syncthreads();
    if (threadIdx.x == 0)
        place = atomicAdd(count, (unsigned long long)found);
    __syncthreads();
    for (unsigned k = threadIdx.x; k < found; k += THREADS)
        rows[place + k] = first + list[k];
}
