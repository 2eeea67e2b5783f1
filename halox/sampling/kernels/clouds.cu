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
#define NDIM 2
#define ORDER 1
#define NUMBERS 1
#endif

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

// The place of a particle's first point, and the weights of its points along each axis.
struct Cloud {
    i64 place;
    double weights[NDIM][3];
};

static __device__ __forceinline__ void locate(const double* position, const Places& places, const Axes& axes, Cloud& cloud)
{
    cloud.place = 0;
    double outside = 0;
    for (int axis = 0; axis < NDIM; ++axis) {
        const double x = position[axis] + axes.shift[axis];
        const double nearest = floor(ORDER == 1 ? x : x + 0.5), rest = x - nearest;
        double(&weights)[3] = cloud.weights[axis];
        weights[0] = ORDER == 0 ? 1 : ORDER == 1 ? 1 - rest : 0.5 * (0.5 - rest) * (0.5 - rest);
        weights[1] = ORDER == 1 ? rest : 0.75 - rest * rest;
        weights[2] = 0.5 * (0.5 + rest) * (0.5 + rest);
        const double index = nearest - (ORDER == 2) - axes.first[axis];
        if (index >= 0 && index <= axes.last[axis])
            cloud.place += i64(index) * places.axes[axis];
        else
            outside = __longlong_as_double(0x7ff8000000000000);
    }
    cloud.weights[0][0] += outside;
}

// Return the weight of a corner, and its place.
static __device__ __forceinline__ double corner_of(const Cloud& cloud, int corner, const Places& places, i64& place)
{
    double weight = 1;
    place = cloud.place;
    for (int axis = 0; axis < NDIM; ++axis, corner /= POINTS) {
        weight *= cloud.weights[axis][corner % POINTS];
        place += corner % POINTS * places.axes[axis];
    }
    return weight;
}

extern "C" __global__ void get_clouds(const char* __restrict__ field, const double* __restrict__ positions,
                                      TYPE* __restrict__ values, i64 particles, i64, const Places places, const Axes axes)
{
    const i64 particle = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (particle >= particles)
        return;
    Cloud cloud;
    double sums[NUMBERS] = {};
    locate(positions + particle * NDIM, places, axes, cloud);
#pragma unroll
    for (int corner = 0; corner < CORNERS; ++corner) {
        i64 place;
        const double weight = corner_of(cloud, corner, places, place);
        for (int number = 0; number < NUMBERS; ++number)
            sums[number] += weight * *(const TYPE*)(field + place + places.numbers[number]);
    }
    for (int number = 0; number < NUMBERS; ++number)
        values[particle * NUMBERS + number] = TYPE(sums[number]);
}

extern "C" __global__ void add_clouds(char* field, const double* __restrict__ positions, const TYPE* __restrict__ values,
                                      i64 particles, i64 stride, const Places places, const Axes axes)
{
    const i64 index = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    const i64 particle = index < particles ? index : particles - 1;  // all lanes take part, some with the value 0
    Cloud cloud;
    locate(positions + particle * NDIM, places, axes, cloud);
    const unsigned lane = threadIdx.x & 31, group = __match_any_sync(~0u, cloud.place);
    const unsigned before = group & ((1u << lane) - 1);
    for (int number = 0; number < NUMBERS; ++number) {
        const double value = index < particles ? values[particle * stride + number] : TYPE(0);
        i64 place;
        TYPE sums[CORNERS];
#pragma unroll
        for (int corner = 0; corner < CORNERS; ++corner)
            sums[corner] = TYPE(corner_of(cloud, corner, places, place) * value);
        // Each lane adds the sums of the next one of its group that is left; then every other lane leaves.
        unsigned after = group & ~((2u << lane) - 1);
        for (unsigned rank = __popc(before); __any_sync(~0u, after); rank >>= 1) {
            const int next = after ? __ffs(after) - 1 : int(lane);
#pragma unroll
            for (int corner = 0; corner < CORNERS; ++corner) {
                const TYPE more = __shfl_sync(~0u, sums[corner], next);
                sums[corner] += after ? more : 0;
            }
            after &= __ballot_sync(~0u, rank % 2 == 0);
        }
#pragma unroll
        for (int corner = 0; corner < CORNERS && before == 0; ++corner) {
            corner_of(cloud, corner, places, place);
            atomicAdd((TYPE*)(field + place + places.numbers[number]), sums[corner]);
        }
    }
}
