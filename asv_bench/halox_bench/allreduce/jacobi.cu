// One step of Jacobi's method for Laplace's equation in three dimensions, as a user writes it.
//
// Contract:  after = the mean of the six neighbours of before, change = after - before, for the nz x ny x nx cells
//            inside a halo of one cell; the three arrays are contiguous, (nz + 2) x (ny + 2) x (nx + 2). Halos of
//            after and change are left as they are.
// Launch:    one-dimensional; blocks take rows of cells in turn, threads the cells of a row.
// Memory:    8 bytes read (neighbours from the caches) and 16 written a cell.

extern "C" __global__ void jacobi(const double* __restrict__ before, double* __restrict__ after,
                                  double* __restrict__ change, int nz, int ny, int nx)
{
    const long long row = nx + 2, slice = row * (ny + 2);
    for (int i = blockIdx.x; i < ny * nz; i += gridDim.x) {
        const long long first = (i / ny + 1) * slice + (i % ny + 1) * row + 1;
        for (int x = threadIdx.x; x < nx; x += blockDim.x) {
            const long long at = first + x;
            const double mean = (before[at - 1] + before[at + 1] + before[at - row] + before[at + row] +
                                 before[at - slice] + before[at + slice]) /
                                6;
            after[at] = mean;
            change[at] = mean - before[at];
        }
    }
}
