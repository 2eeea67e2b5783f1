// The operators of the multigrid cycle on blocks of (z, y, x) points with one layer of ghosts, double precision.
//
// Index:     point (z, y, x), ghosts counted, is at z * plane + y * row + x; plane and row in elements, so that a block
//            may be part of a larger array. Coarse point c is fine point 2 c in each direction.
// Launch:    blockDim.x along x, blockDim.y along y; any block size; each kernel states the work of a thread.
// Memory:    bytes a point to and from device memory where neighbours' loads hit the caches:
//            stencil 24 (16 if base == out), restrict 9 of the fine grid, prolong 17 (add) or 9 of the fine grid.
// Capture:   nothing here depends on values: launches can be captured in a graph.
// Source:    the operators' definition in the NAS Parallel Benchmarks (MG); own implementation.

#ifndef ROWS
#define ROWS 4 // rows that one thread of the stencil computes side by side
#endif

typedef long long Size;

// out = base + S source on the interior of nz * ny * nx points; S has the weights of the centre, the 6 faces, the
// 12 edges and the 8 corners. A thread computes ROWS rows at one x and walks up `planes` planes; blockIdx.z counts
// such walks. Of each plane it loads ROWS + 2 rows of three points, once. base may be out; source may be neither.
//
// Plane z of the source contributes equally to z - 1 and z + 1 ("beside"), and differently to z itself ("here"):
//     out(z) = base(z) + beside(z - 1) + here(z) + beside(z + 1)
extern "C" __global__ void stencil(const double* __restrict__ source, const double* base, double* out, Size plane,
                                   Size row, int nz, int ny, int nx, int planes, double centre, double face,
                                   double edge, double corner)
{
    const int x = 1 + (int)(blockIdx.x * blockDim.x + threadIdx.x);
    const int y = 1 + (int)(blockIdx.y * blockDim.y + threadIdx.y) * ROWS;
    const int first = 1 + (int)blockIdx.z * planes;
    if (x > nx || y > ny || first > nz)
        return;
    const int last = first + planes < nz + 1 ? first + planes : nz + 1;

    double below[ROWS], sum[ROWS]; // beside(z - 1); beside(z - 1) + here(z)
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
        below[i] = sum[i] = 0;

    // Plane z is loaded when out(z - 1) is due; the first two only begin the sums.
    for (int z = first - 1; z <= last; ++z) {
        const double* at = source + z * plane + (y - 1) * row + x;
        double middle[ROWS + 2], sides[ROWS + 2];
#pragma unroll
        for (int i = 0; i < ROWS + 2; ++i) {
            const double* here = at + (y - 1 + i <= ny + 1 ? i : 0) * row; // rows beyond the block are not used
            middle[i] = here[0];
            sides[i] = here[-1] + here[1];
        }
        const Size to = (z - 1) * plane + y * row + x;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const double point = middle[i + 1];
            const double cross = sides[i + 1] + (middle[i] + middle[i + 2]);
            const double diagonal = sides[i] + sides[i + 2];
            const double beside = face * point + edge * cross + corner * diagonal;
            const double here = centre * point + face * cross + edge * diagonal;
            if (z > first && y + i <= ny)
                out[to + i * row] = base[to + i * row] + (sum[i] + beside);
            sum[i] = below[i] + here;
            below[i] = beside;
        }
    }
}

// coarse = average of fine around the coarse points, weights (1, 2, 1) / 4 in each direction, times 4. A thread computes
// one point; blockIdx.z is its plane. nz, ny, nx: interior points of coarse.
extern "C" __global__ void restriction(const double* __restrict__ fine, double* __restrict__ coarse, Size fine_plane,
                                       Size fine_row, Size coarse_plane, Size coarse_row, int nz, int ny, int nx)
{
    const int x = 1 + (int)(blockIdx.x * blockDim.x + threadIdx.x);
    const int y = 1 + (int)(blockIdx.y * blockDim.y + threadIdx.y);
    const int z = 1 + (int)blockIdx.z;
    if (x > nx || y > ny || z > nz)
        return;
    double total = 0;
#pragma unroll
    for (int k = -1; k <= 1; ++k) {
        double layer = 0;
#pragma unroll
        for (int j = -1; j <= 1; ++j) {
            const double* at = fine + (2 * z + k) * fine_plane + (2 * y + j) * fine_row + 2 * x;
            layer += (j == 0 ? 2.0 : 1.0) * (at[-1] + at[1] + 2.0 * at[0]);
        }
        total += (k == 0 ? 2.0 : 1.0) * layer;
    }
    coarse[z * coarse_plane + y * coarse_row + x] = total * 0.0625;
}

// fine = (add ? fine : 0) + trilinear interpolation of coarse, ghosts included. A thread computes 2 x 2 fine points at one
// fine x: those between coarse points c and c + 1 are 2 c and 2 c + 1, in z (blockIdx.z is c) and in y.
// nz, ny: coarse intervals, one more than interior points; nx: fine points along x, ghosts included.
extern "C" __global__ void prolongation(const double* __restrict__ coarse, double* fine, Size coarse_plane,
                                        Size coarse_row, Size fine_plane, Size fine_row, int nz, int ny, int nx, int add)
{
    const int x = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    const int y = (int)(blockIdx.y * blockDim.y + threadIdx.y);
    const int z = (int)blockIdx.z;
    if (x >= nx || y >= ny || z >= nz)
        return;
    // On an even fine x both are the same point, and their mean is its value, exactly.
    const double* low = coarse + z * coarse_plane + y * coarse_row + x / 2;
    const double* high = coarse + z * coarse_plane + y * coarse_row + (x + 1) / 2;
    double value[2][2];
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int j = 0; j < 2; ++j)
            value[k][j] = 0.5 * (low[k * coarse_plane + j * coarse_row] + high[k * coarse_plane + j * coarse_row]);
    const double up = 0.5 * (value[0][0] + value[1][0]); // at even y, and below at odd y
    const double side = 0.5 * (value[0][0] + value[0][1]);
    const double across = 0.5 * (value[1][0] + value[1][1]);
    double* to = fine + 2 * z * fine_plane + 2 * y * fine_row + x;
    const double results[2][2] = {{value[0][0], side}, {up, 0.5 * (side + across)}};
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            double* out = to + k * fine_plane + j * fine_row;
            *out = add ? *out + results[k][j] : results[k][j];
        }
}
