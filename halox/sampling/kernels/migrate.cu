// Migration of particles, with host work in between. `find` and `pack` leave the particles as they are.
//
// find: each position is read once. The rows of particles outside of the block are listed in no order, and those of each
// rank counted: a block of threads collects them first, since few threads find one.
// pack: listed particles of other ranks are written to `sent`, from row counters[rank] on. The rows that they and absorbed
// ones leave are `holes`, or marks in `tail`, from row `after` on, the number of particles after the migration.
// keep: listed particles of this rank are settled in place.
// place: arrivals fill holes and rows from `before` on; unmarked rows of the tail fill the other holes.
//
// A particle is `words` words of type Word, its position first. Counters: particles of each rank (in `pack` the next row
// in `sent`), absorbed, holes that are found, and filled, particles without a place, listed.
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

const i64 POSITION_WORDS = AXES * sizeof(double) / sizeof(Word);

enum { KEEP, REFLECT, ABSORB, WRAP, INSIDE };

enum { ABSORBED, HOLES, FILLED, LOST, LISTED };  // counters after those of the ranks

struct Axis {
    double low, high, cells, rules[2], parts;  // the block, the grid, and the blocks along the axis
};

struct Grid {
    double rank, ranks, bounds;
    Axis axes[AXES];
    double tables[1];  // `bounds` bounds between blocks, axis by axis; then the rank of each block
};

struct Column {  // word w of each particle
    u64 base;
    i64 stride, axis;  // the axis along which a reflection changes the highest bit, or AXES
};

// Return a number of a counter, another one in each call. Threads of a warp with one counter share an addition.
static __device__ u64 claim(u64* counter)
{
    const unsigned lane = threadIdx.x & 31, same = __match_any_sync(__activemask(), u64(counter));
    const int first = __ffs(same) - 1;
    const u64 start = int(lane) == first ? atomicAdd(counter, u64(__popc(same))) : 0;
    return __shfl_sync(same, start, first) + __popc(same & ((1u << lane) - 1));
}

// Apply the rules of the ends of the grid. Return the particle's counter: its rank's, ABSORBED or LOST.
static __device__ i64 settle(double* x, const double* position, const Grid& grid, unsigned& mirrored)
{
    const double* bounds = grid.tables;
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
    return i64(lost ? grid.ranks + LOST : absorbed ? grid.ranks + ABSORBED : grid.tables[i64(grid.bounds) + block]);
}

static __device__ Word* at(const Column& column, i64 row)
{
    return (Word*)(column.base + row * column.stride);
}

static __device__ const double* position_of(const Column* columns, i64 row)
{
    return (const double*)at(columns[0], row);
}

// Return word w of a particle after `settle`.
static __device__ Word settled(const Column& column, i64 row, i64 w, const double* x, unsigned mirrored)
{
    Word word = *at(column, row);
    if (w < POSITION_WORDS)
        memcpy(&word, (const char*)x + w * sizeof(Word), sizeof(Word));
    return mirrored >> column.axis & 1 ? word ^ Word(1) << (8 * sizeof(Word) - 1) : word;
}

extern "C" __global__ void find(const Grid* grid, const double* positions, i64 n, i64* list, u64* counters)
{
    __shared__ unsigned found, outside[THREADS * ROWS];
    __shared__ u64 place;
    const i64 first = i64(blockIdx.x) * (THREADS * ROWS), ranks = i64(grid->ranks);
    double low[AXES], high[AXES];
    for (int axis = 0; axis < AXES; ++axis) {
        low[axis] = grid->axes[axis].low;
        high[axis] = grid->axes[axis].high;
    }
    if (threadIdx.x == 0)
        found = 0;
    __syncthreads();
#pragma unroll 1
    for (unsigned k = threadIdx.x; k < THREADS * ROWS && first + k < n; k += THREADS) {
        const double* const position = positions + (first + k) * AXES;
        bool is_inside = true;
        for (int axis = 0; axis < AXES; ++axis)
            is_inside = is_inside && position[axis] + 0.5 >= low[axis] && position[axis] + 0.5 < high[axis];
        if (!is_inside)
            outside[atomicAdd(&found, 1u)] = k;
    }
    __syncthreads();
    if (threadIdx.x == THREADS - 1 && found)
        place = atomicAdd(counters + ranks + LISTED, u64(found));
    for (unsigned k = threadIdx.x; k < found; k += THREADS) {
        double x[AXES];
        unsigned mirrored;
        claim(counters + settle(x, positions + (first + outside[k]) * AXES, *grid, mirrored));
    }
    __syncthreads();
    for (unsigned k = threadIdx.x; k < found; k += THREADS)
        list[place + k] = first + outside[k];
}

extern "C" __global__ void pack(const Grid* grid, const Column* columns, i64 words, const i64* list, i64 listed,
                                i64 after, u64* counters, Word* sent, i64* holes, unsigned char* tail)
{
    const i64 k = i64(blockIdx.x) * blockDim.x + threadIdx.x, ranks = i64(grid->ranks);
    if (k >= listed)
        return;
    double x[AXES];
    unsigned mirrored;
    const i64 row = list[k], rank = settle(x, position_of(columns, row), *grid, mirrored);
    if (rank == grid->rank)
        return;
    if (row >= after)
        tail[row - after] = 1;
    else
        holes[claim(counters + ranks + HOLES)] = row;
    if (rank == ranks + ABSORBED)
        return;
    Word* const to = sent + claim(counters + rank) * words;
    for (i64 w = 0; w < words; ++w)
        to[w] = settled(columns[w], row, w, x, mirrored);
}

extern "C" __global__ void keep(const Grid* grid, const Column* columns, i64 words, const i64* list, i64 listed)
{
    const i64 k = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (k >= listed)
        return;
    double x[AXES];
    unsigned mirrored;
    const i64 row = list[k];
    if (settle(x, position_of(columns, row), *grid, mirrored) != grid->rank)
        return;
    for (i64 w = 0; w < (mirrored ? words : POSITION_WORDS); ++w)
        *at(columns[w], row) = settled(columns[w], row, w, x, mirrored);
}

extern "C" __global__ void place(const Grid* grid, const Column* columns, i64 words, const Word* arrivals, i64 arrived,
                                 i64 before, i64 after, const i64* holes, i64 left, const unsigned char* tail,
                                 u64* counters)
{
    const i64 k = i64(blockIdx.x) * blockDim.x + threadIdx.x, last = k - arrived;
    if (last >= 0 && (last >= before - after || tail[last]))
        return;
    const i64 hole = last < 0 ? k : arrived + i64(claim(counters + i64(grid->ranks) + FILLED));
    const i64 target = hole < left ? holes[hole] : before + hole - left;
    for (i64 w = 0; w < words; ++w)
        *at(columns[w], target) = last < 0 ? arrivals[k * words + w] : *at(columns[w], after + last);
}
