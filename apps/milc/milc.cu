// The operator of staggered fermions and the vector updates of the conjugate gradient, on the sites of one parity of a block.
//
// Index:     site (t, z, y, h) is number ((t * NZ + z) * NY + y) * NH + h, and is at x = 2 h or 2 h + 1, as its row's parity is.
//            Vectors: components outermost, [3][site]. Those that D reads have a halo of DEPTH sites, along h of its half,
//            rounded up. Matrices: [direction][3 row + column][site], directions as in lattice.py, their signs multiplied in.
// Launch:    one-dimensional, THREADS threads a block, one site a thread, in the order of memory.
// Memory:    bytes a site to and from device memory in double precision (single: half) where neighbours' vectors hit the
//            caches: dslash 144 * 16 + 48 + 48 = 2400 (naive 144 * 8 + 96 = 1248), normal 48 more for p, begin 192,
//            reduce 144, update 240.
// Sums:      a block's values in a tree, then the blocks' in a fixed order, by whichever block ends last.
// Capture:   all that changes between launches is in device memory: launches can be captured in a graph and replayed. They
//            do nothing once state[STATUS] says that the iteration has ended.
// Source:    the operator's definition, see docs/milc.md; own implementation.

#ifndef NT // sites of the block along t, z and y, and half of those along x
#define NT 8
#define NZ 8
#define NY 8
#define NH 4
#endif
#ifndef DEPTH
#define DEPTH 3 // 1: nearest neighbours only
#endif
#ifndef THREADS
#define THREADS 128 // a power of two
#endif
#define BLOCKS 4 // of an SM at the same time, at least, which bounds the registers of D

typedef long long Size;
#ifdef SINGLE
typedef float Real;
typedef float2 Complex;
#else
typedef double Real;
typedef double2 Complex;
#endif

// Numbers of the iteration: see cg.py.
enum { STATUS, R2, PAP, NEW_R2, TARGET, ITERATIONS, MOST, LOCAL };
enum { RUNNING, CONVERGED, EXHAUSTED, BROKEN };

enum : int {
    LOW = (DEPTH + 1) / 2, // halo along h
    ROW = NH + 2 * LOW,
    PLANE = ROW * (NY + 2 * DEPTH),
    CUBE = PLANE * (NZ + 2 * DEPTH),
    DIRECTIONS = DEPTH == 1 ? 8 : 16
};
#define SITES ((Size)NT * NZ * NY * NH)         // of a component without halo
#define FIELD ((Size)CUBE * (NT + 2 * DEPTH))   // with halo

struct Site {
    bool is_inside;
    int odd;    // 1 on an odd row if `row` is 0
    Size plain; // place in a component without halo
    Size place; // with halo
};

// The site of this thread; row: 0 if x is even in the first row of the block.
static __device__ __forceinline__ Site this_site(int row)
{
    const unsigned n = blockIdx.x * THREADS + threadIdx.x;
    const int h = (int)(n % NH), y = (int)(n / NH % NY), z = (int)(n / (NH * NY) % NZ), t = (int)(n / (NH * NY * NZ));
    Site site;
    site.is_inside = n < SITES;
    site.odd = (row + t + z + y) & 1;
    site.plain = n;
    site.place = (Size)(t + DEPTH) * CUBE + (z + DEPTH) * PLANE + (y + DEPTH) * ROW + h + LOW;
    return site;
}

// sum = D source at a site.
static __device__ __forceinline__ void apply(const Complex* __restrict__ matrices, const Complex* __restrict__ source,
                                             const Site& site, Complex* sum)
{
    const Complex* const here = source + site.place;
    const Complex* const matrix = matrices + site.plain;
#pragma unroll
    for (int row = 0; row < 3; ++row)
        sum[row].x = sum[row].y = 0;
#pragma unroll
    for (int direction = 0; direction < DIRECTIONS; ++direction) {
        const int distance = direction < 8 ? 1 : 3, axis = direction / 2 % 4;
        const int step = direction % 2 ? -distance : distance;
        // Along x the place is half the coordinate, rounded down.
        const int offset = axis == 0 ? (site.odd + step) >> 1 : step * (axis == 1 ? ROW : axis == 2 ? PLANE : CUBE);
        Complex v[3];
#pragma unroll
        for (int column = 0; column < 3; ++column)
            v[column] = __ldg(here + column * FIELD + offset);
#pragma unroll
        for (int row = 0; row < 3; ++row)
#pragma unroll
            for (int column = 0; column < 3; ++column) {
                // Nobody reads it again: evicted first.
                const Complex u = __ldcs(matrix + (Size)(9 * direction + 3 * row + column) * SITES);
                sum[row].x += u.x * v[column].x;
                sum[row].x -= u.y * v[column].y;
                sum[row].y += u.x * v[column].y;
                sum[row].y += u.y * v[column].x;
            }
    }
}

// Whether this is the block that ends last, for all of its threads; the others' stores are visible then.
static __device__ bool is_last(unsigned* arrived)
{
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(arrived, 1u) == gridDim.x - 1;
        if (last)
            *arrived = 0;
        __threadfence();
    }
    __syncthreads();
    return last;
}

// Sum of all threads' values of a block, on its thread 0.
static __device__ double of_block(double mine)
{
    __shared__ double values[THREADS];
    values[threadIdx.x] = mine;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < (unsigned)half)
            values[threadIdx.x] += values[threadIdx.x + half];
    }
    __syncthreads();
    return values[0];
}

// Sum of all threads' values into state[target] and state[LOCAL], which several ranks add up.
static __device__ void add_up(double mine, double* state, int target, double* partials, unsigned* arrived)
{
    const double sum = of_block(mine);
    if (threadIdx.x == 0)
        partials[blockIdx.x] = sum;
    if (!is_last(arrived))
        return;
    double part = 0;
    for (unsigned i = threadIdx.x; i < gridDim.x; i += THREADS)
        part += __ldcg(partials + i);
    const double total = of_block(part);
    if (threadIdx.x == 0)
        state[target] = state[LOCAL] = total;
}

static __device__ __forceinline__ double real_product(Complex a, Complex b)
{
    return (double)a.x * b.x + (double)a.y * b.y;
}

// out = D source; both with halo.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    dslash(const Complex* __restrict__ matrices, const Complex* __restrict__ source, Complex* __restrict__ out,
           const double* __restrict__ state, int row)
{
    const Site site = this_site(row);
    if (!site.is_inside || state[STATUS] != RUNNING)
        return;
    Complex sum[3];
    apply(matrices, source, site, sum);
#pragma unroll
    for (int c = 0; c < 3; ++c)
        out[c * FIELD + site.place] = sum[c];
}

// out = scale p - D source, and the sum p . out; source and p with halo, out without.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    normal(const Complex* __restrict__ matrices, const Complex* __restrict__ source, const Complex* __restrict__ p,
           Complex* __restrict__ out, double scale, double* state, double* partials, unsigned* arrived, int row)
{
    if (state[STATUS] != RUNNING)
        return;
    const Site site = this_site(row);
    double product = 0;
    if (site.is_inside) {
        Complex sum[3];
        apply(matrices, source, site, sum);
#pragma unroll
        for (int c = 0; c < 3; ++c) {
            const Complex value = p[c * FIELD + site.place];
            sum[c].x = (Real)scale * value.x - sum[c].x;
            sum[c].y = (Real)scale * value.y - sum[c].y;
            product += real_product(value, sum[c]);
            out[c * SITES + site.plain] = sum[c];
        }
    }
    add_up(product, state, PAP, partials, arrived);
}

// r = b - ap, p = r, and the sum r . r; p with halo, the others without.
extern "C" __global__ void __launch_bounds__(THREADS)
    begin(const Complex* __restrict__ b, const Complex* __restrict__ ap, Complex* __restrict__ r,
          Complex* __restrict__ p, double* state, double* partials, unsigned* arrived)
{
    const Site site = this_site(0);
    double product = 0;
    if (site.is_inside) {
#pragma unroll
        for (int c = 0; c < 3; ++c) {
            const Size at = c * SITES + site.plain;
            Complex value = b[at];
            value.x -= ap[at].x;
            value.y -= ap[at].y;
            product += real_product(value, value);
            r[at] = p[c * FIELD + site.place] = value;
        }
    }
    add_up(product, state, R2, partials, arrived);
}

// r = r - a ap with a = r . r / p . ap, and the sum of the new r . r. Ends the iteration if p . ap is not positive.
extern "C" __global__ void __launch_bounds__(THREADS)
    reduce(const Complex* __restrict__ ap, Complex* __restrict__ r, double* state, double* partials,
           unsigned* arrived)
{
    const double pap = state[PAP];
    if (state[STATUS] != RUNNING)
        return;
    if (!(pap > 0)) { // NaN as well
        if (is_last(arrived) && threadIdx.x == 0)
            state[STATUS] = BROKEN;
        return;
    }
    const Site site = this_site(0);
    const Real a = (Real)(state[R2] / pap);
    double product = 0;
    if (site.is_inside) {
#pragma unroll
        for (int c = 0; c < 3; ++c) {
            const Size at = c * SITES + site.plain;
            const Complex step = ap[at];
            Complex value = r[at];
            value.x -= a * step.x;
            value.y -= a * step.y;
            product += real_product(value, value);
            r[at] = value;
        }
    }
    add_up(product, state, NEW_R2, partials, arrived);
}

// x = x + a p, p = r + b p with b = new r . r / r . r; counts the iteration, and ends it where its time has come.
extern "C" __global__ void __launch_bounds__(THREADS)
    update(const Complex* __restrict__ r, Complex* __restrict__ x, Complex* __restrict__ p, double* state,
            double* history, unsigned* arrived)
{
    if (state[STATUS] != RUNNING)
        return;
    const Site site = this_site(0);
    const double r2 = state[R2], new_r2 = state[NEW_R2];
    const Real a = (Real)(r2 / state[PAP]), b = (Real)(new_r2 / r2);
    if (site.is_inside) {
#pragma unroll
        for (int c = 0; c < 3; ++c) {
            const Size at = c * SITES + site.plain;
            const Complex step = p[c * FIELD + site.place], left = r[at];
            Complex value = x[at];
            value.x += a * step.x;
            value.y += a * step.y;
            x[at] = value;
            value.x = left.x + b * step.x;
            value.y = left.y + b * step.y;
            p[c * FIELD + site.place] = value;
        }
    }
    if (is_last(arrived) && threadIdx.x == 0) {
        const double done = state[ITERATIONS];
        history[(Size)done] = new_r2;
        state[R2] = new_r2;
        state[ITERATIONS] = done + 1;
        if (new_r2 <= state[TARGET])
            state[STATUS] = CONVERGED;
        else if (done + 1 >= state[MOST])
            state[STATUS] = EXHAUSTED;
    }
}
