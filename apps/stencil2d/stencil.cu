// One Jacobi step of the nine-point stencil on part of a row-major plane.
//
// Contract:  for top <= i < bottom, left <= j < right
//                new[i][j] = centre * old[i][j] + cardinal * (N + S + W + E) + diagonal * (NW + NE + SW + SE)
//            Reads one point around that part; writes nothing else of `fresh`. `old` and `fresh` do not overlap.
//            The operations have the order of the NumPy kernel in operator.py; compiled without
//            fused multiply-add the two agree bit for bit.
// Index:     element (i, j) is at i * pitch + j, pitch in elements, 64-bit.
// Launch:    one-dimensional blocks along j; blockIdx.x along j, blockIdx.y along i in steps of ROWS_PER_THREAD;
//            any block size. Each thread walks ROWS_PER_THREAD rows down its column and keeps three rows in registers.
// Memory:    2 * sizeof(REAL) bytes a point from and to device memory, the neighbours' loads hit the L1 cache.
// Source:    the operator's definition in the SHOC benchmark suite (Stencil2D); own implementation.

#ifndef REAL
#define REAL double
#endif
#ifndef ROWS_PER_THREAD
#define ROWS_PER_THREAD 16
#endif

extern "C" __global__ void stencil_step(const REAL* __restrict__ old, REAL* __restrict__ fresh, long long pitch, int top,
                                        int bottom, int left, int right, REAL centre, REAL cardinal, REAL diagonal)
{
    const int column = left + (int)(blockIdx.x * blockDim.x + threadIdx.x);
    const int first = top + (int)blockIdx.y * ROWS_PER_THREAD;
    if (column >= right || first >= bottom)
        return;
    const int last = first + ROWS_PER_THREAD < bottom ? first + ROWS_PER_THREAD : bottom;

    const REAL* row = old + (long long)(first - 1) * pitch + column;
    REAL north_west = row[-1], north = row[0], north_east = row[1];
    row += pitch;
    REAL west = row[-1], here = row[0], east = row[1];
    REAL* out = fresh + (long long)first * pitch + column;

    for (int i = first; i < last; ++i) {
        row += pitch;
        const REAL south_west = row[-1], south = row[0], south_east = row[1];
        const REAL corners = ((north_west + south_west) + (north_east + south_east)) * diagonal;
        const REAL cross = ((west + east) + (north + south)) * cardinal;
        *out = (cross + corners) + here * centre;
        out += pitch;
        north_west = west, north = here, north_east = east;
        west = south_west, here = south, east = south_east;
    }
}
