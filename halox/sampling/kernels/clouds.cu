// get_clouds: numbers of a field at particles. add_clouds: numbers of particles, added to the points of a field.
//
// Along each axis a particle has ORDER + 1 points, with the weights of `weights_of` in `halox/sampling/clouds.py`. A field
// has NUMBERS numbers a point: of all components, real and imaginary parts apart. If a particle has points outside the
// array, its value, or a point that it adds to, becomes NaN.
//
// Launch shape: one dimension of whole warps, a thread a particle. Particles of a warp with the same points, as in a
// sorted list, are added up in registers, so that few atomic additions are left. Bytes moved: positions and values once,
// and the field once if particles are sorted.
//
// With SLICES 2, add_clouds splits each term in multiples of a large and of a small unit, and adds them to two doubles a
// number. No such sum is rounded, and so none depends on the order. See J. Demmel and H. D. Nguyen: Parallel
// reproducible summation, IEEE Transactions on Computers 64 (7), 2015, section 4.

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
#ifndef SLICES
#define SLICES 1
#endif

typedef TYPE Number;
#if SLICES == 1
typedef Number Target;
#else
typedef double Target;
#endif
typedef long long i64;

constexpr int POINTS = ORDER + 1;
constexpr int CORNERS = POINTS * (NDIM > 1 ? POINTS : 1) * (NDIM > 2 ? POINTS : 1) * (NDIM > 3 ? POINTS : 1);

// Strides of the field in bytes, and the places of its numbers.
struct Places {
    i64 axes[NDIM], numbers[NUMBERS * SLICES];
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
                                      i64, const double*)
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

// Return a slice of a term, which is rounded before.
static __device__ __forceinline__ double slice_of(double weight, double value, int slice, const double* units)
{
    if (SLICES == 1)
        return weight * value;
    const double term = __dmul_rn(weight, value), high = (term + units[0]) - units[0];
    return slice == 0 ? high : ((term - high) + units[1]) - units[1];
}

extern "C" __global__ void add_clouds(char* field, const double* __restrict__ positions,
                                      const Number* __restrict__ values, const Places places, const Axes axes,
                                      i64 particles, i64 stride, const double* __restrict__ units)
{
    const i64 index = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    const i64 particle = index < particles ? index : particles - 1;  // all lanes take part, some with the value 0
    Weights weights;
    char* const first = field + locate(positions + particle * NDIM, places, axes, weights);
    const unsigned lane = threadIdx.x & 31, group = __match_any_sync(~0u, (unsigned long long)first);
    const unsigned before = group & ((1u << lane) - 1);
    for (int target = 0; target < NUMBERS * SLICES; ++target) {
        const double value = index < particles ? values[particle * stride + target / SLICES] : Number(0);
        Target sums[CORNERS];
#pragma unroll
        for (int corner = 0; corner < CORNERS; ++corner)
            sums[corner] = Target(slice_of(weight_of(corner, weights), value, target % SLICES, units));
        // Each lane adds the sums of the next one of its group that is left; then every other lane leaves.
        unsigned after = group & ~((2u << lane) - 1);
        for (unsigned rank = __popc(before); __any_sync(~0u, after); rank >>= 1) {
            const int next = after ? __ffs(after) - 1 : int(lane);
#pragma unroll
            for (int corner = 0; corner < CORNERS; ++corner) {
                const Target more = __shfl_sync(~0u, sums[corner], next);
                sums[corner] += after ? more : 0;
            }
            after &= __ballot_sync(~0u, rank % 2 == 0);
        }
        if (before == 0) {
#pragma unroll
            for (int corner = 0; corner < CORNERS; ++corner)
                atomicAdd((Target*)(first + places.numbers[target] + place_of(corner, places)), sums[corner]);
        }
    }
}
