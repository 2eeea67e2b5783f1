// get_clouds: numbers of a field at particles. add_clouds: numbers of particles, added to the points of a field.
//
// Along each axis a particle has ORDER + 1 points, with the weights of `weights_of` in `halox/sampling/clouds.py`. A field
// has NUMBERS numbers a point: of all components, real and imaginary parts apart. If a particle has points outside the
// array, its value, or a point that it adds to, becomes NaN.
//
// Launch shape: one dimension of whole warps, a thread a particle. Particles of a warp with the same points, as in a
// sorted list, are added up in registers, so that few atomic additions are left. Bytes moved: positions and values once,
// and the field once if particles are sorted.

#ifndef TYPE
#define TYPE double
#endif
#ifndef NDIM
#define NDIM 2
#endif
#ifndef ORDER
#define ORDER 1
#endif
#ifndef NUMBERS
#define NUMBERS 1
#endif

typedef TYPE Number;
typedef long long i64;

constexpr int POINTS = ORDER + 1;
constexpr int CORNERS = POINTS * (NDIM > 1 ? POINTS : 1) * (NDIM > 2 ? POINTS : 1) * (NDIM > 3 ? POINTS : 1);

// Strides of the field in bytes, and the places of its numbers.
struct Places {
    i64 axes[NDIM], numbers[NUMBERS];
};

// By axis: 1/2 if points are at faces; the index of the array's first point; its points less ORDER + 1.
struct Axes {
    double shift[NDIM], first[NDIM], last[NDIM];
};

typedef double Weights[NDIM][3];

// Return the place of a particle's first point, and set the weights of its points along each axis.
static __device__ __forceinline__ i64 locate(const double* position, const Places& places, const Axes& axes,
                                             Weights& weights)
{
    i64 place = 0;
    bool inside = true;
#pragma unroll
    for (int axis = 0; axis < NDIM; ++axis) {
        const double x = position[axis] + axes.shift[axis];
        const double nearest = floor(ORDER == 1 ? x : x + 0.5), rest = x - nearest;
        weights[axis][0] = ORDER == 0 ? 1 : ORDER == 1 ? 1 - rest : 0.5 * (0.5 - rest) * (0.5 - rest);
        weights[axis][1] = ORDER == 1 ? rest : 0.75 - rest * rest;
        weights[axis][2] = 0.5 * (0.5 + rest) * (0.5 + rest);
        const double index = nearest - (ORDER == 2) - axes.first[axis];
        const bool is_in = index >= 0 && index <= axes.last[axis];
        place += is_in ? i64(index) * places.axes[axis] : 0;
        inside = inside && is_in;
    }
    if (!inside)
        weights[0][0] = __longlong_as_double(0x7ff8000000000000);
    return place;
}

static __device__ __forceinline__ i64 place_of(int corner, const Places& places)
{
    i64 place = 0;
#pragma unroll
    for (int axis = 0; axis < NDIM; ++axis, corner /= POINTS)
        place += corner % POINTS * places.axes[axis];
    return place;
}

static __device__ __forceinline__ double weight_of(int corner, const Weights& weights)
{
    double weight = 1;
#pragma unroll
    for (int axis = 0; axis < NDIM; ++axis, corner /= POINTS)
        weight *= weights[axis][corner % POINTS];
    return weight;
}

extern "C" __global__ void get_clouds(const char* __restrict__ field, const double* __restrict__ positions,
                                      Number* __restrict__ values, const Places places, const Axes axes, i64 particles,
                                      i64)
{
    const i64 particle = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (particle >= particles)
        return;
    Weights weights;
    double sums[NUMBERS] = {};
    const char* const first = field + locate(positions + particle * NDIM, places, axes, weights);
#pragma unroll
    for (int corner = 0; corner < CORNERS; ++corner)
#pragma unroll
        for (int number = 0; number < NUMBERS; ++number)
            sums[number] += weight_of(corner, weights) *
                            *(const Number*)(first + place_of(corner, places) + places.numbers[number]);
#pragma unroll
    for (int number = 0; number < NUMBERS; ++number)
        values[particle * NUMBERS + number] = Number(sums[number]);
}

extern "C" __global__ void add_clouds(char* field, const double* __restrict__ positions,
                                      const Number* __restrict__ values, const Places places, const Axes axes,
                                      i64 particles, i64 stride)
{
    const i64 index = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    const i64 particle = index < particles ? index : particles - 1;  // all lanes take part, some with the value 0
    Weights weights;
    char* const first = field + locate(positions + particle * NDIM, places, axes, weights);
    const unsigned lane = threadIdx.x & 31, group = __match_any_sync(~0u, (unsigned long long)first);
    const unsigned before = group & ((1u << lane) - 1);
    for (int number = 0; number < NUMBERS; ++number) {
        const double value = index < particles ? values[particle * stride + number] : Number(0);
        Number sums[CORNERS];
#pragma unroll
        for (int corner = 0; corner < CORNERS; ++corner)
            sums[corner] = Number(weight_of(corner, weights) * value);
        // Each lane adds the sums of the next one of its group that is left; then every other lane leaves.
        unsigned after = group & ~((2u << lane) - 1);
        for (unsigned rank = __popc(before); __any_sync(~0u, after); rank >>= 1) {
            const int next = after ? __ffs(after) - 1 : int(lane);
#pragma unroll
            for (int corner = 0; corner < CORNERS; ++corner) {
                const Number more = __shfl_sync(~0u, sums[corner], next);
                sums[corner] += after ? more : 0;
            }
            after &= __ballot_sync(~0u, rank % 2 == 0);
        }
        if (before == 0) {
#pragma unroll
            for (int corner = 0; corner < CORNERS; ++corner)
                atomicAdd((Number*)(first + places.numbers[number] + place_of(corner, places)), sums[corner]);
        }
    }
}
