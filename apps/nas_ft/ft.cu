// The operations of NAS FT but the transforms, on blocks of (z, y, x) points, complex double precision.
//
// Index:     point (z, y, x) is at (z * ny + y) * nx + x; a block is contiguous.
// Launch:    blockDim.x along x, blockDim.y along y, blockIdx.z is z; any block size.
// Memory:    bytes a point to and from device memory: initial 16, evolve 32.
// Capture:   all that changes between launches is in device memory: launches can be captured in a graph and replayed.
// Source:    the definition of the NAS Parallel Benchmarks (FT); own implementation.

#ifndef ROWS
#define ROWS 4 // rows that one thread of evolve treats, with as many loads at a time
#endif

typedef long long Size;
typedef unsigned long long Number;

#define MASK ((1ULL << 46) - 1)
#define UNIT (1.0 / (1ULL << 46)) // exact

// u = random numbers: factors z * y * x mod 2^46, of which x has two per point, for the real and the imaginary part.
// 64-bit products wrap around at a multiple of 2^46, so their low 46 bits are correct. A thread computes one point.
extern "C" __global__ void initial(double2* __restrict__ u, const Number* __restrict__ of_z,
                                   const Number* __restrict__ of_y, const Number* __restrict__ of_x, int nz, int ny,
                                   int nx)
{
    const int x = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    const int y = (int)(blockIdx.y * blockDim.y + threadIdx.y);
    const int z = (int)blockIdx.z;
    if (x >= nx || y >= ny || z >= nz)
        return;
    const Number row = of_z[z] * of_y[y];
    double2 value;
    value.x = (double)((row * of_x[2 * x]) & MASK) * UNIT;
    value.y = (double)((row * of_x[2 * x + 1]) & MASK) * UNIT;
    u[((Size)z * ny + y) * nx + x] = value;
}

// spectrum *= factors z * y * x, in place; one thread of the launch also counts the step. A thread treats ROWS rows at
// one x: it loads them all before it stores the first.
extern "C" __global__ void evolve(double2* __restrict__ spectrum, const double* __restrict__ of_z,
                                  const double* __restrict__ of_y, const double* __restrict__ of_x,
                                  Size* __restrict__ step, int nz, int ny, int nx)
{
    const int x = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    const int y = (int)(blockIdx.y * blockDim.y + threadIdx.y) * ROWS;
    const int z = (int)blockIdx.z;
    if (x == 0 && y == 0 && z == 0)
        ++*step;
    if (x >= nx || y >= ny || z >= nz)
        return;
    double2* at = spectrum + ((Size)z * ny + y) * nx + x;
    const double plane = of_z[z] * of_x[x];
    double2 value[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
        if (y + i < ny)
            value[i] = at[(Size)i * nx];
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
        if (y + i < ny) {
            const double factor = plane * of_y[y + i];
            value[i].x *= factor;
            value[i].y *= factor;
            at[(Size)i * nx] = value[i];
        }
}

// Row step - 1 of samples = the points of u at the offsets. A thread copies one; the launch is a line along x.
extern "C" __global__ void sample(const double2* __restrict__ u, const Size* __restrict__ offsets,
                                  double2* __restrict__ samples, const Size* __restrict__ step, int count)
{
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < count)
        samples[(*step - 1) * count + i] = u[offsets[i]];
}
