// Migration of particles, with host work in between; `find` and `pack` leave the particles as they are.
//
// find: each position is read once. The rows of particles outside of the block are listed in no order, and counted by
// rank. A block of threads collects them first, since few threads find one.
// pack: listed particles of other ranks are written to `sent`, in order of the ranks.
// keep: listed particles of this rank are settled in place. Others leave a hole, or NaN in one of the last rows.
// place: arrivals fill holes and rows from `before` on; without arrivals, particles of the last rows fill holes.
//
// The last rows are those from `after` on, the number of particles after the migration. Counters: particles of each rank,
// then those of the enum, and particles of each rank that are packed. Launch shape: any number of blocks of THREADS.

#ifndef AXES
#define AXES 3
#define WORD unsigned long long
#endif

typedef WORD Word;
typedef long long i64;
typedef unsigned long long u64;

constexpr int THREADS = 128, ROWS = 8;  // rows that each thread of `find` looks at before it settles any
constexpr int POSITION_WORDS = AXES * sizeof(double) / sizeof(Word);

enum { KEEP, REFLECT, ABSORB, WRAP };
enum { ABSORBED, LOST, LISTED, HOLES, FILLED, PACKED };

struct Grid {
    double rank, ranks, bounds;
    struct {
        double low, high, cells, ends[2], parts;  // the block, the grid, and the blocks along the axis
    } axes[AXES];
    double tables[1];  // `bounds` bounds between blocks, axis by axis; then the rank of each block
};

struct Particles {
    i64 words;
    struct {  // in row r word w is at base + r * stride; a reflection along `axis` changes its highest bit
        i64 base, stride, axis;
    } columns[1];

    __device__ Word* at(i64 row, i64 w) const { return (Word*)(columns[w].base + row * columns[w].stride); }
    __device__ double* position(i64 row) const { return (double*)at(row, 0); }
};

// Return a number of a counter, another one in each call. Threads of a warp with one counter share an addition.
static __device__ i64 claim(u64* counter)
{
    const unsigned lane = threadIdx.x & 31, same = __match_any_sync(__activemask(), u64(counter));
    const int first = __ffs(same) - 1;
    const u64 start = int(lane) == first ? atomicAdd(counter, u64(__popc(same))) : 0;
    return i64(__shfl_sync(same, start, first)) + __popc(same & ((1u << lane) - 1));
}

// A particle by the rules at the ends of the grid: its place, the axes that mirror it, and its counter.
struct Settled {
    double x[AXES];
    unsigned mirrored;
    i64 counter;

    __device__ Settled(const Grid& grid, const double* position) : mirrored(0)
    {
        const double* bounds = grid.tables;
        i64 block = 0;
        bool absorbed = false, lost = false;
        for (int axis = 0; axis < AXES; ++axis) {
            const auto& along = grid.axes[axis];
            const double n = along.cells, turns = floor((position[axis] + 0.5) / n);
            const double end = along.ends[turns > 0], other = along.ends[!(turns > 0)];
            double to = position[axis];
            lost = lost || !(fabs(to) < 0x1p53);
            if (turns != 0 && (end == WRAP || (end == REFLECT && (other == REFLECT || fabs(turns) == 1)))) {
                to -= turns * n;
                if (end == REFLECT && fmod(turns, 2.0) != 0) {
                    to = n - 1 - to;
                    mirrored |= 1u << axis;
                }
                to = fmin(fmax(to, -0.5), nextafter(n, 0.0) - 0.5);  // whatever the rounding
            } else if (turns != 0) {
                const double fate = end == REFLECT ? other : end;
                absorbed = absorbed || fate == ABSORB;
                lost = lost || fate == KEEP;
            }
            int part = 0;
            for (int k = 0; k < int(along.parts) - 1; ++k)
                part += *bounds++ <= to + 0.5;
            block = block * int(along.parts) + part;
            x[axis] = to;
        }
        counter = i64(lost ? grid.ranks + LOST : absorbed ? grid.ranks + ABSORBED : grid.tables[i64(grid.bounds) + block]);
    }

    __device__ Word word(const Particles& particles, i64 row, i64 w) const
    {
        Word word = *particles.at(row, w);
        if (w < POSITION_WORDS)
            memcpy(&word, (const char*)x + w * sizeof(Word), sizeof(Word));
        return word ^ Word(mirrored >> particles.columns[w].axis & 1) << (8 * sizeof(Word) - 1);
    }
};

extern "C" __global__ void find(const Grid* grid, const Particles* particles, i64 n, i64* list, u64* counters)
{
    __shared__ unsigned found, outside[THREADS * ROWS];
    __shared__ u64 place;
    const double* const positions = particles->position(0);
    double low[AXES], high[AXES];
    for (int axis = 0; axis < AXES; ++axis) {
        low[axis] = grid->axes[axis].low;
        high[axis] = grid->axes[axis].high;
    }
    for (i64 first = i64(blockIdx.x) * (THREADS * ROWS); first < n; first += i64(gridDim.x) * (THREADS * ROWS)) {
        if (threadIdx.x == 0)
            found = 0;
        __syncthreads();
#pragma unroll 1
        for (unsigned k = threadIdx.x; k < THREADS * ROWS && first + k < n; k += THREADS) {
            bool is_inside = true;
            for (int axis = 0; axis < AXES; ++axis) {
                const double x = positions[(first + k) * AXES + axis] + 0.5;
                is_inside = is_inside && x >= low[axis] && x < high[axis];
            }
            if (!is_inside)
                outside[atomicAdd(&found, 1u)] = k;
        }
        __syncthreads();
        if (threadIdx.x == THREADS - 1 && found)
            place = atomicAdd(counters + i64(grid->ranks) + LISTED, u64(found));
        for (unsigned k = threadIdx.x; k < found; k += THREADS)
            claim(counters + Settled(*grid, positions + (first + outside[k]) * AXES).counter);
        __syncthreads();
        for (unsigned k = threadIdx.x; k < found; k += THREADS)
            list[place + k] = first + outside[k];
        __syncthreads();
    }
}

extern "C" __global__ void pack(const Grid* grid, const Particles* particles, const i64* list, u64* counters, Word* sent)
{
    const i64 ranks = i64(grid->ranks), listed = i64(counters[ranks + LISTED]), words = particles->words;
    for (i64 k = i64(blockIdx.x) * THREADS + threadIdx.x; k < listed; k += i64(gridDim.x) * THREADS) {
        const Settled settled(*grid, particles->position(list[k]));
        if (settled.counter == grid->rank || settled.counter >= ranks)
            continue;
        i64 row = claim(counters + ranks + PACKED + settled.counter);
        for (i64 rank = 0; rank < settled.counter; ++rank)
            row += rank == grid->rank ? 0 : i64(counters[rank]);
        for (i64 w = 0; w < words; ++w)
            sent[row * words + w] = settled.word(*particles, list[k], w);
    }
}

extern "C" __global__ void keep(const Grid* grid, const Particles* particles, const i64* list, u64* counters, i64 after,
                                i64* holes)
{
    const i64 ranks = i64(grid->ranks), listed = i64(counters[ranks + LISTED]);
    for (i64 k = i64(blockIdx.x) * THREADS + threadIdx.x; k < listed; k += i64(gridDim.x) * THREADS) {
        const i64 row = list[k];
        const Settled settled(*grid, particles->position(row));
        if (settled.counter == grid->rank) {
            const i64 words = settled.mirrored ? particles->words : POSITION_WORDS;
            for (i64 w = 0; w < words; ++w)
                *particles->at(row, w) = settled.word(*particles, row, w);
        } else if (row < after) {
            holes[claim(counters + ranks + HOLES)] = row;
        } else {
            *particles->position(row) = nan("");
        }
    }
}

extern "C" __global__ void place(const Grid* grid, const Particles* particles, const Word* arrivals, i64 first, i64 rows,
                                 i64 before, i64 after, i64 left, u64* counters, const i64* holes)
{
    for (i64 k = i64(blockIdx.x) * THREADS + threadIdx.x; k < rows; k += i64(gridDim.x) * THREADS) {
        if (!arrivals && isnan(*particles->position(after + k)))
            continue;
        const i64 hole = first + (arrivals ? k : claim(counters + i64(grid->ranks) + FILLED));
        const i64 target = hole < left ? holes[hole] : before + hole - left;
        for (i64 w = 0; w < particles->words; ++w)
            *particles->at(target, w) = arrivals ? arrivals[k * particles->words + w] : *particles->at(after + k, w);
    }
}
