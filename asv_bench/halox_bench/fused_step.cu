// 5-point steps of float32 on a block of nx x ny cells with a halo of one: without an exchange, and with stores into the
// halos of the neighbours, behind halox.device_header().
//
// Contract:  next = u + 0.2 (sum of the four neighbours - 4 u), for the owned cells; `fused` waits for the halo of u, and
//            sends faces of the new field as it computes them.
// Launch:    threads and blocks over y and x, a thread a cell. Memory: 4 bytes read and 4 written a cell.

__device__ float updated(const float* u, int x, int y, int row)
{
    const float* at = u + (long long)x * row + y;
    return at[0] + 0.2f * (at[-row] + at[row] + at[-1] + at[1] - 4 * at[0]);
}

extern "C" __global__ void alone(const float* u, float* next, int nx, int ny)
{
    const int y = 1 + blockIdx.x * blockDim.x + threadIdx.x;
    const int x = 1 + blockIdx.y * blockDim.y + threadIdx.y;
    if (x <= nx && y <= ny)
        next[(long long)x * (ny + 2) + y] = updated(u, x, y, ny + 2);
}

extern "C" __global__ void fused(const halox::Halo<2> halo, int field, const float* u, int nx, int ny)
{
    const int y = 1 + blockIdx.x * blockDim.x + threadIdx.x;
    const int x = 1 + blockIdx.y * blockDim.y + threadIdx.y;
    if (x <= nx && y <= ny) {
        halo.wait({x, y});
        halo.store(field, {x, y}, updated(u, x, y, ny + 2));
    }
}
