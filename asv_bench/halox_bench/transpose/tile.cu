// A transpose through shared memory, as a user writes it: tiles of 32 x 32 elements, rows one element longer.
//
// Contract:  to[b * to_batch + c * to_pitch + r] = from[b * from_batch + r * from_pitch + c] for every r < rows,
//            c < columns and b below the number of batches; pitches and batches count elements.
// Launch:    256 threads a block, one block a tile: the tiles of a row of tiles first, then the rows, then the batches.
// Memory:    each element read and written once, both in runs of 32.

#ifndef ELEMENT_BYTES
#define ELEMENT_BYTES 8
#endif

typedef unsigned long long u64;

#if ELEMENT_BYTES == 1
typedef unsigned char element;
#elif ELEMENT_BYTES == 2
typedef unsigned short element;
#elif ELEMENT_BYTES == 4
typedef unsigned element;
#elif ELEMENT_BYTES == 8
typedef u64 element;
#else
struct __align__(16) element {
    u64 low, high;
};
#endif

extern "C" __global__ void tile(
    const element* from, element* to, unsigned rows, unsigned columns, u64 from_pitch, u64 to_pitch, u64 from_batch,
    u64 to_batch)
{
    __shared__ element held[32][33];
    const unsigned across = (columns + 31) / 32, down = (rows + 31) / 32, x = threadIdx.x % 32, y = threadIdx.x / 32;
    const unsigned first_column = blockIdx.x % across * 32, number = blockIdx.x / across;
    const unsigned first_row = number % down * 32, batch = number / down;
    from += batch * from_batch;
    to += batch * to_batch;
    for (unsigned i = y; i < 32; i += 8)
        if (first_row + i < rows && first_column + x < columns)
            held[i][x] = from[(first_row + i) * from_pitch + first_column + x];
    __syncthreads();
    for (unsigned i = y; i < 32; i += 8)
        if (first_column + i < columns && first_row + x < rows)
            to[(first_column + i) * to_pitch + first_row + x] = held[x][i];
}
