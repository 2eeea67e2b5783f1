// traversal: packs or unpacks any datatype by walking its tree from the root to each word.
//
// The tree's records are in preorder, and its lists in a lookaside buffer. Each thread finds the places of its words
// from their canonical numbers, which count the words in packed order (Jenkins, Dinan, Balaji, Peterka, Samatova,
// Thakur: Processing MPI derived datatypes on noncontiguous GPU-resident data, IEEE TPDS 2014, section 3). The size of
// a word divides all lengths and distances of the tree, so every word is within one run of bytes. Word w is packed at
//   packed + w * WORD_BYTES       and is at       array + the sum of the records' displacements.
//
// Records are a kernel parameter, which each block copies to shared memory. A tree of more than NODES records stays in
// device memory, and so does the lookaside buffer.
//
// Launch shape: one dimension, THREADS threads a block, any number of blocks. A thread takes every T-th word, where T
// is the number of all threads.
//
// Bytes moved: each word is read once and written once. Each word reads the records from the root to its leaf, and for
// a list of n entries one entry, or log2(n) + 2 if the entries have different lengths, mostly from the L1 cache.

#ifndef WORD_BYTES
#define WORD_BYTES 16
#endif
#ifndef THREADS
#define THREADS 128
#endif
#define NODES 32
#define IN_FLIGHT 4  // words that a thread loads before it stores the first word

typedef unsigned int u32;
typedef unsigned long long u64;

// 16 bytes that are loaded and stored in one access.
struct __align__(16) Piece {
    u64 low, high;
};

#if WORD_BYTES == 16
typedef Piece Word;
#elif WORD_BYTES == 8
typedef u64 Word;
#elif WORD_BYTES == 4
typedef u32 Word;
#elif WORD_BYTES == 2
typedef unsigned short Word;
#else
typedef unsigned char Word;
#endif

enum Kind { LEAF, REPEAT, GATHER, SEARCH, BRANCH };

struct Node {
    u32 kind, shift;
    u64 words, magic;   // REPEAT, GATHER: words of a child; w / words == __umul64hi(w, magic) >> shift, unless words == 1
    u64 stride;         // LEAF: bytes from word to word; REPEAT: bytes from child to child
    u64 displacements;  // GATHER, SEARCH, BRANCH: first entry of the list of the children's displacements
    u64 entries;        // SEARCH, BRANCH: entries of each list
    u64 prefix;         //                 first entry of the list of the children's first words
    u64 children;       // BRANCH: first entry of the list of the children's records; otherwise the child is the next record
};

struct Table {
    const Node* nodes;  // null if the records are in `node`
    const u64* lists;   // the lookaside buffer
    u64 words;
    u64 n_nodes;
    Node node[NODES];
};

// Returns the tree's records: copied to shared memory if they are a kernel parameter.
__device__ __forceinline__ const Node* records(const Table& table)
{
    __shared__ Node shared[NODES];
    if (table.nodes)  // the same for all threads
        return table.nodes;
    for (u32 i = threadIdx.x; i < table.n_nodes; i += THREADS)
        shared[i] = table.node[i];
    __syncthreads();
    return shared;
}

// Returns the displacement of a word: descends from the root to a leaf, while `id` becomes the word's number in a child.
__device__ __forceinline__ u64 place(const Node* nodes, const u64* lists, u64 id)
{
    u64 at = 0, record = 0;
    while (true) {
        const Node& node = nodes[record++];
        if (node.kind == LEAF)
            return at + id * node.stride;
        if (node.kind == REPEAT || node.kind == GATHER) {
            const u64 child = node.words == 1 ? id : __umul64hi(id, node.magic) >> node.shift;
            id -= child * node.words;
            at += node.kind == REPEAT ? child * node.stride : lists[node.displacements + child];
            continue;
        }
        // The last entry whose first word is not after this word.
        const u64* prefix = lists + node.prefix;
        u64 entry = 0, end = node.entries;
        while (end - entry > 1) {
            const u64 middle = (entry + end) / 2;
            if (prefix[middle] <= id)
                entry = middle;
            else
                end = middle;
        }
        id -= prefix[entry];
        at += lists[node.displacements + entry];
        if (node.kind == BRANCH)
            record = lists[node.children + entry];
    }
}

// Moves all words: the places of some words of a thread, then their loads, then their stores, so that latencies overlap.
template <bool UNPACK>
__device__ __forceinline__ void move(u64 array, u64 packed, const Table& table)
{
    const Node* nodes = records(table);
    const u64 step = u64(gridDim.x) * THREADS;
    for (u64 first = u64(blockIdx.x) * THREADS + threadIdx.x; first < table.words; first += IN_FLIGHT * step) {
        u64 there[IN_FLIGHT], here[IN_FLIGHT];
        Word word[IN_FLIGHT];
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; ++i) {
            const u64 id = first + i * step;
            here[i] = packed + id * WORD_BYTES;
            if (id < table.words)
                there[i] = array + place(nodes, table.lists, id);
        }
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; ++i)
            if (first + i * step < table.words)
                word[i] = *(const Word*)(UNPACK ? here[i] : there[i]);
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; ++i)
            if (first + i * step < table.words)
                *(Word*)(UNPACK ? there[i] : here[i]) = word[i];
    }
}

// Room for 64 registers; by default the compiler spills some of them to use fewer.
#define ENTRY extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)

ENTRY traversal_pack(u64 array, u64 packed, const __grid_constant__ Table table)
{
    move<false>(array, packed, table);
}

ENTRY traversal_unpack(u64 array, u64 packed, const __grid_constant__ Table table)
{
    move<true>(array, packed, table);
}
