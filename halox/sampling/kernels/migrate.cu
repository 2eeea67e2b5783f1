// Migration of particles: `find` the rows outside of the block, `pack` the particles that leave, and `place` the others.
//
// find: each position is read once. Rows outside of the block are listed in no order: a block of threads collects them
// in shared memory, and adds to the list once. Counters: particles of each rank, absorbed, without a place, listed.
// pack: a row of `sent` for each particle that goes to another rank, from `cursors[rank]` on, -1 in the list, and the row
// that it leaves: in `holes` if it is below `after`, the number of particles after the migration, else a mark in `tail`.
// place: particles that stay are settled, arrivals fill holes and rows from `before` on, and unmarked rows of the tail
// fill the other holes.
//
// A particle's row is `words` words of type Word. Word w of row r is at base[w] + r * stride[w], and a reflection along
// axis a changes the bits masks[a * words + w]; the first words are the position.
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
        double at = position[axis], wall = 0;
        bool mirror = false;
        lost = lost || !(fabs(at) < 0x1p53);
        if (low == high && (low == WRAP || low == REFLECT)) {
            const double turns = floor((at + 0.5) / n);
            at -= turns * n;
            mirror = low == REFLECT && fmod(turns, 2.0) != 0;
            wall = n - 1;
        } else if (low == REFLECT) {
            mirror = at + 0.5 < 0;
            wall = -1;
        } else if (high == REFLECT) {
            mirror = at + 0.5 >= n;
            wall = 2 * n - 1;
        }
        if (mirror) {
            at = wall - at;
            mirrored |= 1u << axis;
        }
        if (low == REFLECT || low == WRAP)
            at = fmax(at, -0.5);
        if (high == REFLECT || high == WRAP)
            at = fmin(at, nextafter(n, 0.0) - 0.5);
        const int end = at + 0.5 < 0 ? low : at + 0.5 >= n ? high : INSIDE;
        absorbed = absorbed || end == ABSORB;
        lost = lost || end == KEEP;
        int part = 0;
        for (int k = 0; k < int(along.parts) - 1; ++k)
            part += *bounds++ <= at + 0.5;
        block = block * int(along.parts) + part;
        x[axis] = at;
    }
    return lost ? grid.ranks + 1 : absorbed ? grid.ranks : grid.rank_of[block];
}

// Return a word of a particle after `settle`.
static __device__ Word settled(const Rows& rows, i64 row, int w, const double* x, unsigned mirrored)
{
    Word word;
    if (w * sizeof(Word) < AXES * sizeof(double)) {
        memcpy(&word, (const char*)x + w * sizeof(Word), sizeof(Word));
        return word;
    }
    word = *(const Word*)(rows.base[w] + row * rows.stride[w]);
    for (int axis = 0; axis < AXES; ++axis)
        if (mirrored >> axis & 1)
            word ^= rows.masks[axis * rows.words + w];
    return word;
}

static __device__ void store(const Rows& rows, i64 row, int w, Word word)
{
    *(Word*)(rows.base[w] + row * rows.stride[w]) = word;
}

extern "C" __global__ void find(const Grid grid, const double* positions, i64 n, i64* list, u64* counters)
{
    __shared__ unsigned found, rows[THREADS * ROWS];
    __shared__ u64 place;
    const i64 first = i64(blockIdx.x) * (THREADS * ROWS);
    if (threadIdx.x == 0)
        found = 0;
    __syncthreads();
#pragma unroll
    for (unsigned row = threadIdx.x; row < THREADS * ROWS; row += THREADS) {
        bool is_inside = true;
        for (int axis = 0; axis < AXES && first + row < n; ++axis) {
            const double at = positions[(first + row) * AXES + axis] + 0.5;
            is_inside = is_inside && at >= grid.axes[axis].low && at < grid.axes[axis].high;
        }
        if (!is_inside)
            rows[atomicAdd(&found, 1u)] = row;
    }
    __syncthreads();
    if (threadIdx.x == 0 && found)
        place = atomicAdd(counters + grid.ranks + 2, u64(found));
    __syncthreads();
    for (unsigned k = threadIdx.x; k < found; k += THREADS) {
        double x[AXES];
        unsigned mirrored;
        list[place + k] = first + rows[k];
        atomicAdd(counters + settle(x, positions + (first + rows[k]) * AXES, grid, mirrored), u64(1));
    }
}

extern "C" __global__ void pack(const Grid grid, const Rows rows, const double* positions, i64* list, i64 listed,
                                i64 after, u64* cursors, Word* sent, i64* holes, unsigned char* tail)
{
    const i64 k = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (k >= listed)
        return;
    double x[AXES];
    unsigned mirrored;
    const i64 row = list[k], rank = settle(x, positions + row * AXES, grid, mirrored);
    if (rank == grid.rank)
        return;
    list[k] = -1;
    if (row >= after)
        tail[row - after] = 1;
    else
        holes[atomicAdd(cursors + grid.ranks, u64(1))] = row;
    if (rank == grid.ranks)
        return;
    Word* const to = sent + atomicAdd(cursors + rank, u64(1)) * rows.words;
    for (int w = 0; w < rows.words; ++w)
        to[w] = settled(rows, row, w, x, mirrored);
}

extern "C" __global__ void place(const Grid grid, const Rows rows, const double* positions, const i64* list, i64 listed,
                                 i64 before, i64 after, u64* cursors, const Word* arrivals, i64 arrived,
                                 const i64* holes, i64 left, const unsigned char* tail)
{
    i64 k = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (k >= listed && k < listed + arrived) {
        k -= listed;
        const i64 target = k < left ? holes[k] : before + k - left;
        for (int w = 0; w < rows.words; ++w)
            store(rows, target, w, arrivals[k * rows.words + w]);
        return;
    }
    const i64 last = k - listed - arrived;  // of the tail
    if (k >= listed && (last >= before - after || tail[last]))
        return;
    double x[AXES];
    unsigned mirrored;
    const i64 row = k < listed ? list[k] : after + last;
    if (k < listed && (row < 0 || row >= after))
        return;  // it has left, or the thread of its row of the tail moves it
    if (settle(x, positions + row * AXES, grid, mirrored) != grid.rank)
        return;
    const i64 target = k < listed ? row : holes[arrived + atomicAdd(cursors + grid.ranks + 1, u64(1))];
    for (int w = 0; w < rows.words; ++w)
        store(rows, target, w, settled(rows, row, w, x, mirrored));
}
