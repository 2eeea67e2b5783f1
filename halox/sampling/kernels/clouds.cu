// get_clouds: numbers of a field at particles. add_clouds: numbers of particles, added to the points of a field.
//
// Along each axis a particle has ORDER + 1 points, with the weights of `weights_of` in `halox/sampling/clouds.py`. A field
// has NUMBERS numbers a point: of all components, real and imaginary parts apart. If a particle has points outside the
// array, its value, or a point that it adds to, becomes NaN.
//
// Launch shape: one dimension of whole warps; a thread gets one particle, or adds EACH particles. Particles of a warp with
// the same points, as in a sorted list, are added up in registers, so that few atomic additions are left. Bytes moved:
// positions and values once, and the field once if particles are sorted.

#ifndef TYPE
#define TYPE double
#define NDIM 2
#define ORDER 1
#define NUMBERS 1
#define EACH 2
#endif

typedef long long i64;

constexpr int POINTS = ORDER + 1;
constexpr int CORNERS = POINTS * (NDIM > 1 ? POINTS : 1) * (NDIM > 2 ? POINTS : 1) * (NDIM > 3 ? POINTS : 1);

// By axis: strides of the field in bytes, and points of the array less ORDER + 1. Then the places of its numbers.
struct Places {
    i64 axes[NDIM], last[NDIM], numbers[NUMBERS];
};

// By axis: 1/2 if points are at faces; the index of the array's first point.
struct Axes {
    double shift[NDIM], first[NDIM];
};

struct alignas(NDIM % 2 ? 8 : 16) Position {
    double along[NDIM];
};

// The place of a particle's first point, and the weights of its points along each axis.
struct Cloud {
    i64 place;
    double weights[NDIM][3];
};

static __device__ __forceinline__ void locate(Position position, const Places& places, const Axes& axes, Cloud& cloud)
{
    cloud.place = 0;
    double outside = 0;
    for (int axis = 0; axis < NDIM; ++axis) {
        const double x = position.along[axis] + axes.shift[axis];
        const double nearest = floor(ORDER == 1 ? x : x + 0.5), rest = x - nearest;
        double(&weights)[3] = cloud.weights[axis];
        weights[0] = ORDER == 0 ? 1 : ORDER == 1 ? 1 - rest : 0.5 * (0.5 - rest) * (0.5 - rest);
        weights[1] = ORDER == 1 ? rest : 0.75 - rest * rest;
        weights[2] = 0.5 * (0.5 + rest) * (0.5 + rest);
        const double index = nearest - (ORDER == 2) - axes.first[axis];
        if (unsigned(int(index)) <= unsigned(places.last[axis]))
            cloud.place += i64(unsigned(int(index))) * places.axes[axis];
        else
            outside = __longlong_as_double(0x7ff8000000000000);
    }
    cloud.weights[0][0] += outside;
}

// Return a number times the weight of a corner.
static __device__ __forceinline__ double weighted(double number, const Cloud& cloud, int corner)
{
    for (int axis = 0; axis < NDIM; ++axis, corner /= POINTS)
        number *= cloud.weights[axis][corner % POINTS];
    return number;
}

static __device__ __forceinline__ i64 corner_of(i64 place, int corner, const Places& places)
{
    for (int axis = 0; axis < NDIM; ++axis, corner /= POINTS)
        place += corner % POINTS * places.axes[axis];
    return place;
}

extern "C" __global__ void get_clouds(const char* __restrict__ field, const Position* __restrict__ positions,
                                      TYPE* __restrict__ values, i64 particles, i64, const Places places, const Axes axes)
{
    const i64 particle = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (particle >= particles)
        return;
    Cloud cloud;
    double sums[NUMBERS] = {};
    locate(positions[particle], places, axes, cloud);
#pragma unroll
    for (int corner = 0; corner < CORNERS; ++corner) {
        const i64 place = corner_of(cloud.place, corner, places);
        const double weight = weighted(1, cloud, corner);
        for (int number = 0; number < NUMBERS; ++number)
            sums[number] += weight * *(const TYPE*)(field + place + places.numbers[number]);
    }
    for (int number = 0; number < NUMBERS; ++number)
        values[particle * NUMBERS + number] = TYPE(sums[number]);
}

// Lanes that add put their sums to the points of their place: the first lane of a place with the sums of all of them.
static __device__ __forceinline__ void add_places(char* field, i64 place, bool adds, TYPE (&sums)[CORNERS], const Places& places)
{
    const unsigned lane = threadIdx.x & 31, same = __match_any_sync(~0u, place) & __ballot_sync(~0u, adds);
    const unsigned group = adds ? same : 0, before = group & ((1u << lane) - 1);
    // In a round a lane takes the sums of the next one of its group that is left; then every other lane leaves.
    unsigned after = group & ~((2u << lane) - 1);
    for (unsigned rank = __popc(before); __any_sync(~0u, after); rank >>= 1) {
        const int next = after ? __ffs(after) - 1 : int(lane);
        TYPE more[CORNERS];
#pragma unroll
        for (int corner = 0; corner < CORNERS; ++corner)
            more[corner] = __shfl_sync(~0u, sums[corner], next);
        if (after)  // all at once, so that the compiler makes conditional additions instead of selections
#pragma unroll
            for (int corner = 0; corner < CORNERS; ++corner)
                sums[corner] += more[corner];
        after &= __ballot_sync(~0u, rank % 2 == 0);
    }
#pragma unroll
    for (int corner = 0; corner < CORNERS && adds && before == 0; ++corner)
        atomicAdd((TYPE*)(field + corner_of(place, corner, places)), sums[corner]);
}

extern "C" __global__ void add_clouds(char* field, const Position* __restrict__ positions, const TYPE* __restrict__ values,
                                      i64 particles, i64 stride, const Places places, const Axes axes)
{
    const i64 first = (i64(blockIdx.x) * blockDim.x + threadIdx.x) * EACH;
    Cloud clouds[EACH];
#pragma unroll
    for (int n = 0; n < EACH; ++n)  // all lanes take part, some with the value 0
        locate(positions[first + n < particles ? first + n : particles - 1], places, axes, clouds[n]);
    for (int number = 0; number < NUMBERS; ++number) {
        TYPE sums[CORNERS] = {};
#pragma unroll
        for (int n = 0; n < EACH; ++n) {
            const double value = first + n < particles ? values[(first + n) * stride + number] : TYPE(0);
#pragma unroll
            for (int corner = 0; corner < CORNERS; ++corner)
                sums[corner] += TYPE(weighted(value, clouds[n], corner));
            const bool ends = n + 1 == EACH || clouds[n].place != clouds[(n + 1) % EACH].place;
            if (!__any_sync(~0u, ends))
                continue;
            add_places(field + places.numbers[number], clouds[n].place, ends, sums, places);
#pragma unroll
            for (int corner = 0; corner < CORNERS; ++corner)
                sums[corner] = ends ? 0 : sums[corner];
        }
    }
}
