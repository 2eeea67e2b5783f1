// One step of a 7-point stencil for a box of cells, as a user writes it.
//
// Contract:  v = the mean of the six neighbours of u, for the cells x0 <= x < x1, y0 <= y < y1, z0 <= z < z1 (x the
//            innermost axis); pitches count elements. All other cells of v are left as they are.
// Launch:    threads and blocks over x and y, blocks over z in a grid-stride loop.
// Memory:    8 bytes read (neighbours from the caches) and 8 written a cell.

extern "C" __global__ void seven_point(
    const double* u, double* v, int pitch_y, int pitch_x, int x0, int x1, int y0, int y1, int z0, int z1)
{
    const int x = x0 + blockIdx.x * blockDim.x + threadIdx.x;
    const int y = y0 + blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= x1 || y >= y1)
        return;
    const long long row = pitch_x, slice = (long long)pitch_y * pitch_x;
    for (int z = z0 + blockIdx.z; z < z1; z += gridDim.z) {
        const long long at = z * slice + y * row + x;
        v[at] = (u[at - 1] + u[at + 1] + u[at - row] + u[at + row] + u[at - slice] + u[at + slice]) / 6;
    }
}
