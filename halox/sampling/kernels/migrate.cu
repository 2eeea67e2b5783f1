// Migration of particles in three steps, with host work in between.
//
// find: each position is read once. Particles outside of the block that belong to this rank are settled in place. The
// rows of the others are listed in no order: a block of threads collects them, and adds to the list once. Counters:
// particles of each rank, absorbed, without a place, listed.
// pack: particles that leave are written to `sent`, from row cursors[rank] on. The rows that they leave are `holes`, or
// marks in `tail`, from row `after` on, the number of particles after the migration.
// place: arrivals fill holes and rows from `before` on; unmarked rows of the tail fill the other holes.
//
// A particle is `words` words of type Word, its position first. Word w of row r is at base[w] + r * stride[w], and a
// reflection along axis a changes its bits masks[a * words + w].
//
// Launch shape: one dimension; for `find` THREADS * ROWS positions a block, else a thread an item.

#ifndef AXES
#define AXES 3
#endif
#ifndef WORD
#define WORD unsigned long long
#endif
#ifndef THREADS
#define THREADS 256
#endif
#ifndef ROWS
#define ROWS 8
#endif

typedef WORD Word;
typedef long long i64;
typedef unsigned long long u64;

enum { KEEP, REFLECT, ABSORB, WRAP, INSIDE };

struct Axis {
    double low, high, cells, rules[2], parts;  // the block, the grid, and the blocks along the axis
};

struct Grid {
    const double* bounds;  // between blocks, axis by axis
    const i64* rank_of;  // each block
    i64 rank, ranks;
    Axis axes[AXES];
};

struct Rows {
    const u64 *base, *stride;
    const Word* masks;
    i64 words;
};

// Apply the rules of the ends of the grid. Return the rank, `ranks` for absorbed particles, `ranks + 1` without a place.
static __device__ i64 settle(double* x, const double* position, const Grid& grid, unsigned& mirrored)
{
    const double* bounds = grid.bounds;
    i64 block = 0;
    bool absorbed = false, lost = false;
    mirrored = 0;
    for (int axis = 0; axis < AXES; ++axis) {
        const Axis& along = grid.axes[axis];
        const int low = int(along.rules[0]), high = int(along.rules[1]);
        const double n = along.cells;
        double to = position[axis], wall = 0;
        bool mirror = false;
        lost = lost || !(fabs(to) < 0x1p53);
        if (low == high && (low == WRAP || low == REFLECT)) {
            const double turns = floor((to + 0.5) / n);
            to -= turns * n;
            mirror = low == REFLECT && fmod(turns, 2.0) != 0;
            wall = n - 1;
        } else if (low == REFLECT) {
            mirror = to + 0.5 < 0;
            wall = -1;
        } else if (high == REFLECT) {
            mirror = to + 0.5 >= n;
            wall = 2 * n - 1;
        }
        if (mirror) {
            to = wall - to;
            mirrored |= 1u << axis;
        }
        if (low == REFLECT || low == WRAP)
            to = fmax(to, -0.5);
        if (high == REFLECT || high == WRAP)
            to = fmin(to, nextafter(n, 0.0) - 0.5);
        const int end = to + 0.5 < 0 ? low : to + 0.5 >= n ? high : INSIDE;
        absorbed = absorbed || end == ABSORB;
        lost = lost || end == KEEP;
        int part = 0;
        for (int k = 0; k < int(along.parts) - 1; ++k)
            part += *bounds++ <= to + 0.5;
        block = block * int(along.parts) + part;
        x[axis] = to;
    }
    return lost ? grid.ranks + 1 : absorbed ? grid.ranks : grid.rank_of[block];
}

static __device__ Word* at(const Rows& rows, i64 row, i64 w)
{
    return (Word*)(rows.base[w] + row * rows.stride[w]);
}

// Return a word of a particle after `settle`.
static __device__ Word settled(const Rows& rows, i64 row, i64 w, const double* x, unsigned mirrored)
{
    Word word = *at(rows, row, w);
    if (w < i64(AXES * sizeof(double) / sizeof(Word)))
        memcpy(&word, (const char*)x + w * sizeof(Word), sizeof(Word));
    for (int axis = 0; axis < AXES; ++axis)
        if (mirrored >> axis & 1)
            word ^= rows.masks[axis * rows.words + w];
    return word;
}

extern "C" __global__ void find(const Grid grid, const Rows rows, const double* positions, i64 n, i64* list,
                                u64* counters)
{
    __shared__ unsigned found, leavers[THREADS * ROWS];
    __shared__ u64 place;
    const i64 first = i64(blockIdx.x) * (THREADS * ROWS);
    if (threadIdx.x == 0)
        found = 0;
    __syncthreads();
#pragma unroll 1
    for (unsigned k = threadIdx.x; k < THREADS * ROWS; k += THREADS) {
        const double* const position = positions + (first + k) * AXES;
        bool is_inside = true;
        for (int axis = 0; axis < AXES && first + k < n; ++axis)
            is_inside = is_inside && position[axis] + 0.5 >= grid.axes[axis].low &&
                        position[axis] + 0.5 < grid.axes[axis].high;
        if (is_inside)
            continue;
        double x[AXES];
        unsigned mirrored;
        const i64 rank = settle(x, position, grid, mirrored);
        atomicAdd(counters + rank, u64(1));
        if (rank != grid.rank)
            leavers[atomicAdd(&found, 1u)] = k;
        else
            for (i64 w = 0; w < rows.words; ++w)
                *at(rows, first + k, w) = settled(rows, first + k, w, x, mirrored);
    }
    __syncthreads();
    if (threadIdx.x == 0 && found)
        place = atomicAdd(counters + grid.ranks + 2, u64(found));
    __syncthreads();
    for (unsigned k = threadIdx.x; k < found; k += THREADS)
        list[place + k] = first + leavers[k];
}

extern "C" __global__ void pack(const Grid grid, const Rows rows, const double* positions, const i64* list, i64 listed,
                                i64 after, u64* cursors, Word* sent, i64* holes, unsigned char* tail)
{
    const i64 k = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (k >= listed)
        return;
    double x[AXES];
    unsigned mirrored;
    const i64 row = list[k], rank = settle(x, positions + row * AXES, grid, mirrored);
    if (row >= after)
        tail[row - after] = 1;
    else
        holes[atomicAdd(cursors + grid.ranks, u64(1))] = row;
    if (rank == grid.ranks)
        return;
    Word* const to = sent + atomicAdd(cursors + rank, u64(1)) * rows.words;
    for (i64 w = 0; w < rows.words; ++w)
        to[w] = settled(rows, row, w, x, mirrored);
}

extern "C" __global__ void place(const Grid grid, const Rows rows, const Word* arrivals, i64 arrived, i64 before,
                                 i64 after, const i64* holes, i64 left, const unsigned char* tail, u64* cursors)
{
    const i64 k = i64(blockIdx.x) * blockDim.x + threadIdx.x, last = k - arrived;
    if (last >= 0 && (last >= before - after || tail[last]))
        return;
    const i64 hole = last < 0 ? k : arrived + i64(atomicAdd(cursors + grid.ranks + 1, u64(1)));
    const i64 target = hole < left ? holes[hole] : before + hole - left;
    for (i64 w = 0; w < rows.words; ++w)
        *at(rows, target, w) = last < 0 ? arrivals[k * rows.words + w] : *at(rows, after + last, w);
}
