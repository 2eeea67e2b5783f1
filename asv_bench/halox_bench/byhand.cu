// What a careful user writes for one layout: packing kernels that know nothing of datatypes.
//
// Contract:  with UNPACK 0 copies words of the layout to `packed`, with UNPACK 1 the other way. `array` is the address
//            that the layout's offsets count from.
// boxes      WORD_BYTES a word, up to three levels of equal strides; several boxes one after another, each with blocks
//            of its own. Aligned: offsets, strides, runs and `packed` are multiples of the word.
// triangle   One block a column of the lower triangle of an n x n matrix of doubles, one thread an element.
// gathers    Elements of `words` words by a list of their numbers, the list repeated `count` times.
// faces      Boxes of several arrays at once, each with `each` blocks; addresses of arrays and packed bytes are absolute.
// Launch:    one-dimensional, THREADS threads; boxes and gathers exactly as many blocks as their tables say, faces `each`
//            for every row of its table, triangle any number.
// Memory:    every byte read once and written once.

#ifndef WORD_BYTES
#define WORD_BYTES 8
#endif
#ifndef THREADS
#define THREADS 256
#endif
#ifndef UNPACK
#define UNPACK 0
#endif
#ifndef PARTS
#define PARTS 10
#endif
// Words a thread moves: loads of all of them are under way before the first store.
#ifndef EACH
#define EACH 4
#endif

typedef unsigned long long u64;

#if WORD_BYTES == 16
struct __align__(16) Word {
    u64 low, high;
};
#elif WORD_BYTES == 8
typedef u64 Word;
#elif WORD_BYTES == 4
typedef unsigned int Word;
#elif WORD_BYTES == 2
typedef unsigned short Word;
#else
typedef unsigned char Word;
#endif

// Finds the part of a block, each having as many as it says, and makes `block` its number there.
template <class Part> static __device__ __forceinline__ const Part& part_of(const Part* part, unsigned& block)
{
    while (block >= part->blocks)
        block -= part++->blocks;
    return *part;
}

// Stores the words of a thread, the first at `first` of `total`, in the array or behind one another in `out`.
static __device__ __forceinline__ void store(Word* const* at, const Word* word, Word* out, unsigned first,
                                             unsigned total)
{
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const unsigned t = first + e * THREADS;
        if (t < total)
            *(UNPACK ? at[e] : out + t) = word[e];
    }
}

struct Box {
    long long array, packed; // first bytes
    long long stride[3];     // bytes, innermost first
    unsigned count[3];       // innermost first; unused levels are 1
    unsigned words;          // of a run
    unsigned total;          // words of all runs
    unsigned blocks;
};

struct Boxes {
    Box box[PARTS];
};

extern "C" __global__ void __launch_bounds__(THREADS)
    boxes(unsigned char* array, unsigned char* packed, const __grid_constant__ Boxes table)
{
    unsigned block = blockIdx.x;
    const Box& box = part_of(table.box, block);

    Word* at[EACH];
    Word word[EACH];
    Word* const out = (Word*)(packed + box.packed);
    const unsigned first = block * (THREADS * EACH) + threadIdx.x;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const unsigned t = first + e * THREADS;
        if (t < box.total) {
            unsigned run = t / box.words;
            const unsigned w = t - run * box.words;
            const unsigned row = run / box.count[0];
            run -= row * box.count[0];
            const unsigned plane = row / box.count[1];
            at[e] = (Word*)(array + box.array + run * box.stride[0] + (row - plane * box.count[1]) * box.stride[1] +
                            plane * box.stride[2]) + w;
            word[e] = UNPACK ? out[t] : *at[e];
        }
    }
    store(at, word, out, first, box.total);
}

// `table` is in device memory. The boxes are moved side by side; those that are done sooner leave blocks without work.
extern "C" __global__ void __launch_bounds__(THREADS) faces(const Box* table, unsigned each)
{
    const Box& box = table[blockIdx.x / each];
    const unsigned first = blockIdx.x % each * THREADS + threadIdx.x, step = each * THREADS;
    for (unsigned t = first; t < box.total; t += step) {
        const unsigned run = t / box.words, row = run / box.count[0], plane = row / box.count[1];
        Word* const at = (Word*)(box.array + (run - row * box.count[0]) * box.stride[0] +
                                 (row - plane * box.count[1]) * box.stride[1] + plane * box.stride[2]) +
                         (t - run * box.words);
        Word* const packed = (Word*)box.packed + t;
        *(UNPACK ? at : packed) = *(UNPACK ? packed : at);
    }
}

extern "C" __global__ void triangle(double* array, double* packed, unsigned n)
{
    for (unsigned j = blockIdx.x; j < n; j += gridDim.x) {
        const long long column = j;
        double* const from = array + column * n + column;
        double* const to = packed + column * n - column * (column - 1) / 2;
#pragma unroll 4
        for (unsigned i = threadIdx.x; i < n - j; i += blockDim.x)
            if (UNPACK)
                from[i] = to[i];
            else
                to[i] = from[i];
    }
}

struct Gather {
    const unsigned* index;
    long long array, packed, extent; // bytes
    unsigned entries;                // of the list
    unsigned words;                  // of an element
    unsigned total;                  // words of all elements
    unsigned blocks;
};

struct Gathers {
    Gather part[PARTS];
};

extern "C" __global__ void __launch_bounds__(THREADS)
    gathers(unsigned char* array, unsigned char* packed, const __grid_constant__ Gathers table)
{
    unsigned block = blockIdx.x;
    const Gather& part = part_of(table.part, block);

    Word* at[EACH];
    Word word[EACH];
    Word* const out = (Word*)(packed + part.packed);
    const unsigned first = block * (THREADS * EACH) + threadIdx.x;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const unsigned t = first + e * THREADS;
        if (t < part.total) {
            const unsigned element = t / part.words;
            const unsigned item = element / part.entries;
            Word* const origin = (Word*)(array + part.array + item * part.extent);
            at[e] = origin + (u64)part.index[element - item * part.entries] * part.words + (t - element * part.words);
        }
    }
#pragma unroll
    for (int e = 0; e < EACH; ++e)
        if (first + e * THREADS < part.total)
            word[e] = UNPACK ? out[first + e * THREADS] : *at[e];
    store(at, word, out, first, part.total);
}
