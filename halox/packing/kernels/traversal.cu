// traversal: packs or unpacks any datatype by walking its tree from the root to each word.
//
// The tree's records are in preorder, and its lists in a lookaside buffer. Each thread finds the places of its words
// from their canonical numbers, which count the words in packed order (Jenkins, Dinan, Balaji, Peterka, Samatova,
// Thakur: Processing MPI derived datatypes on noncontiguous GPU-resident data, IEEE TPDS 2014, section 3). The size of
// a word divides all lengths and distances of the tree, so every word is within one run of bytes. Word w is packed at
//   packed + w * WORD_BYTES       and is at       array + the sum of the records' displacements.
//
// The guide of a list cuts its words into buckets of 2^bucket; guide[b] is the entry that holds the first
// word of bucket b, so that the binary search over prefix sums starts with one or two entries left.
//
// There are three kernels to pack, and three to unpack. A simpler tree needs fewer instructions before the first load:
//   traversal_pack_regular  trees of strides only, which are kernel parameters
//   traversal_pack_chain    trees without branches: all words visit the same records, which are kernel parameters
//   traversal_pack          any tree: records in shared memory, words diverge at branches
//
// Launch shape: one dimension, THREADS threads a block, `copied` bytes of dynamic shared memory. Any grid
// works: blocks stride over chunks of `chunk_words` consecutive words.
//
// Bytes moved: each word is read once and written once; each block reads `copied` bytes, and each word an
// entry of every list that it visits, mostly from the L1 cache.

#ifndef WORD_BYTES
#define WORD_BYTES 16
#endif
#ifndef INDEX_BITS
#define INDEX_BITS 32  // 64 for 2^31 words or more
#endif
#ifndef IN_FLIGHT
#define IN_FLIGHT 4  // words that a thread loads before it stores the first word
#endif
#ifndef THREADS
#define THREADS 128
#endif
#ifndef CHAIN_NODES
#define CHAIN_NODES 8
#endif
#ifndef INLINE_BYTES
#define INLINE_BYTES 1024
#endif

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

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

#if INDEX_BITS == 64
typedef u64 Index;
#define HIGH_HALF __umul64hi
#else
typedef u32 Index;
#define HIGH_HALF __umulhi
#endif

enum Kind { LEAF, REPEAT, GATHER, FAR_GATHER, SEARCH, BRANCH };

struct __align__(16) Node {
    i64 stride;                 // LEAF: bytes from word to word; REPEAT: from child to child; GATHER: to add
    Index words, magic;         // words of a child, if all are equal: w / words == HIGH_HALF(w, magic) >> shift,
    u32 shift, kind;            //   and magic is 0 if words == 1
    u32 displacements;          // first entry of the list, which for GATHER is in words and among the numbers
    u32 prefix, guide, bucket;  // SEARCH, BRANCH: first entries; log2 of a bucket's words
    u32 children;               // BRANCH: first entry of the list of records
};

struct __align__(16) Table {
    u64 image;  // address of records (of a branching tree), numbers, displacements; 0 if in `lists`
    u64 words;
    i64 leaf_stride;  // of the last record
    u32 chunk_words;
    u32 levels;  // records before the last one
    u32 chunks;
    u32 copied;                  // bytes of the image to copy to shared memory
    u32 numbers, displacements;  // first bytes of both in the image
    Node node[CHAIN_NODES];
};

struct __align__(16) ListedTable {
    Table table;
    Piece lists[INLINE_BYTES / sizeof(Piece)];
};

extern __shared__ Piece shared_image[];

// Addresses of the parts of the image, for a block.
struct Image {
    const Node* nodes;
    const Index* numbers;
    const i64* displacements;
};

__device__ __forceinline__ Image bring(const ListedTable& listed)
{
    const Table& table = listed.table;
    if (table.copied) {  // the same for all threads of the block
        const Piece* image = (const Piece*)table.image;
        for (u32 i = threadIdx.x; i < table.copied / sizeof(Piece); i += THREADS)
            shared_image[i] = image ? image[i] : listed.lists[i];
        __syncthreads();
    }
    const u64 near = (u64)shared_image, far = table.image;
    Image found;
    found.nodes = (const Node*)(table.copied ? near : far);
    found.numbers = (const Index*)((table.copied > table.numbers ? near : far) + table.numbers);
    found.displacements =
        (const i64*)((table.copied > table.displacements ? near : far) + table.displacements);
    return found;
}

// Descends from words of a node to the children that hold them: `id` becomes the number in the child.
template <u32 N>
__device__ __forceinline__ void repeat(const Node& node, Index (&id)[N], u64 (&at)[N])
{
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
        const Index child = HIGH_HALF(id[i], node.magic) >> node.shift;
        at[i] += u64(child) * u64(node.stride);
        id[i] -= child * node.words;
    }
}

template <u32 N>
__device__ __forceinline__ void gather(
    const Node& node, const Image& image, bool far, Index (&id)[N], u64 (&at)[N])
{
    Index entry[N];
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
        entry[i] = node.magic ? HIGH_HALF(id[i], node.magic) >> node.shift : id[i];
        id[i] -= entry[i] * node.words;
        at[i] += u64(node.stride);
    }
    if (far) {
        const i64* displacements = image.displacements + node.displacements;
#pragma unroll
        for (u32 i = 0; i < N; ++i)
            at[i] += u64(displacements[entry[i]]);
    } else {
        const Index* displacements = image.numbers + node.displacements;
#pragma unroll
        for (u32 i = 0; i < N; ++i)
            at[i] += u64(displacements[entry[i]]) * WORD_BYTES;
    }
}

template <u32 N>
__device__ __forceinline__ void search(
    const Node& node, const Image& image, Index (&id)[N], u64 (&at)[N], Index (&entry)[N])
{
    const Index* prefix = image.numbers + node.prefix;
    const Index* guide = image.numbers + node.guide;
    const i64* displacements = image.displacements + node.displacements;
    Index last[N];
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
        const Index bucket = id[i] >> node.bucket;
        entry[i] = guide[bucket];
        last[i] = guide[bucket + 1];
    }
    // The searches of all words advance together, so that their loads overlap.
    for (bool open = true; open;) {
        open = false;
#pragma unroll
        for (u32 i = 0; i < N; ++i) {
            if (entry[i] < last[i]) {
                const Index middle = last[i] - ((last[i] - entry[i]) >> 1);
                if (prefix[middle] <= id[i])
                    entry[i] = middle;
                else
                    last[i] = middle - 1;
                open = true;
            }
        }
    }
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
        at[i] += u64(displacements[entry[i]]);
        id[i] -= prefix[entry[i]];
    }
}

template <u32 N>
__device__ __forceinline__ void leaf(i64 stride, const Index (&id)[N], u64 (&at)[N])
{
#pragma unroll
    for (u32 i = 0; i < N; ++i)
        at[i] += u64(id[i]) * u64(stride);
}

// The three descents.
struct RegularWalk {
    const Table& table;

    template <u32 N>
    __device__ __forceinline__ void operator()(Index (&id)[N], u64 (&at)[N]) const
    {
        // Unrolled, so that every number is an operand at a fixed place of the constant bank.
#pragma unroll
        for (u32 k = 0; k + 1 < CHAIN_NODES; ++k) {
            if (k == table.levels)
                break;
            repeat(table.node[k], id, at);
        }
        leaf(table.leaf_stride, id, at);
    }
};

struct ChainWalk {
    const Table& table;
    const Image image;

    template <u32 N>
    __device__ __forceinline__ void operator()(Index (&id)[N], u64 (&at)[N]) const
    {
#pragma unroll 1
        for (u32 k = 0; k < table.levels; ++k) {
            const u32 kind = table.node[k].kind;
            if (kind == REPEAT) {
                repeat(table.node[k], id, at);
            } else if (kind <= FAR_GATHER) {
                gather(table.node[k], image, kind == FAR_GATHER, id, at);
            } else {
                Index entry[N];
                search(table.node[k], image, id, at, entry);
            }
        }
        leaf(table.leaf_stride, id, at);
    }
};

struct TreeWalk {
    const Image image;

    template <u32 N>
    __device__ __forceinline__ void operator()(Index (&id)[N], u64 (&at)[N]) const
    {
        u32 record = 0;
        Index entry[N];
        if (!down(record, id, at, entry))
            return;
        // From the first branch on, each word descends separately.
        const u32 children = image.nodes[record].children;
#pragma unroll
        for (u32 i = 0; i < N; ++i) {
            Index one_id[1] = {id[i]}, one_entry[1] = {entry[i]};
            u64 one_at[1] = {at[i]};
            u32 list = children, own;
            do {
                own = u32(image.numbers[list + one_entry[0]]);
                if (!down(own, one_id, one_at, one_entry))
                    break;
                list = image.nodes[own].children;
            } while (true);
            at[i] = one_at[0];
        }
    }

    // Descends from a record through its first branch, or to a leaf.
    template <u32 N>
    __device__ __forceinline__ bool down(
        u32& record, Index (&id)[N], u64 (&at)[N], Index (&entry)[N]) const
    {
        for (;; ++record) {
            const Node node = image.nodes[record];
            if (node.kind == LEAF) {
                leaf(node.stride, id, at);
                return false;
            }
            if (node.kind == REPEAT) {
                repeat(node, id, at);
            } else if (node.kind <= FAR_GATHER) {
                gather(node, image, node.kind == FAR_GATHER, id, at);
            } else {
                search(node, image, id, at, entry);
                if (node.kind == BRANCH)
                    return true;
            }
        }
    }
};

// Moves the words [first, last): positions of a thread's words, then all loads, then all stores, so that
// their latencies overlap.
template <bool PACK, class Walk>
__device__ __forceinline__ void move_words(
    u64 array, u64 packed, Index first, Index last, const Walk& walk)
{
    for (Index start = first + threadIdx.x; start < last; start += IN_FLIGHT * THREADS) {
        Index id[IN_FLIGHT];
        u64 at[IN_FLIGHT];
        Word word[IN_FLIGHT];
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; ++i) {
            const Index wanted = start + i * THREADS;
            id[i] = wanted < last ? wanted : last - 1;  // lists have no entries for words that do not exist
            at[i] = array;
        }
        walk(id, at);
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; ++i) {
            const u64 there = packed + u64(start + i * THREADS) * WORD_BYTES;
            if (start + i * THREADS < last)
                word[i] = *(const Word*)(PACK ? at[i] : there);
        }
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; ++i) {
            const u64 there = packed + u64(start + i * THREADS) * WORD_BYTES;
            if (start + i * THREADS < last)
                *(Word*)(PACK ? there : at[i]) = word[i];
        }
    }
}

template <bool PACK, class Walk>
__device__ __forceinline__ void move(u64 array, u64 packed, const Table& table, const Walk& walk)
{
    const Index words = Index(table.words);
    for (u32 chunk = blockIdx.x; chunk < table.chunks; chunk += gridDim.x) {
        const Index first = Index(chunk) * table.chunk_words;
        const Index left = words - first;
        const Index last = first + (left < table.chunk_words ? left : table.chunk_words);
        move_words<PACK>(array, packed, first, last, walk);
    }
}

#define ENTRY extern "C" __global__ void __launch_bounds__(THREADS)
#if WORD_BYTES == 16 && IN_FLIGHT > 1
// Room for 64 registers; by default the compiler spills some of them to use 32 or 40.
#define TREE_ENTRY extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
#else
#define TREE_ENTRY ENTRY
#endif

ENTRY traversal_pack_regular(u64 array, u64 packed, const __grid_constant__ Table table)
{
    move<true>(array, packed, table, RegularWalk{table});
}

ENTRY traversal_unpack_regular(u64 array, u64 packed, const __grid_constant__ Table table)
{
    move<false>(array, packed, table, RegularWalk{table});
}

ENTRY traversal_pack_chain(u64 array, u64 packed, const __grid_constant__ ListedTable listed)
{
    move<true>(array, packed, listed.table, ChainWalk{listed.table, bring(listed)});
}

ENTRY traversal_unpack_chain(u64 array, u64 packed, const __grid_constant__ ListedTable listed)
{
    move<false>(array, packed, listed.table, ChainWalk{listed.table, bring(listed)});
}

TREE_ENTRY traversal_pack(u64 array, u64 packed, const __grid_constant__ ListedTable listed)
{
    move<true>(array, packed, listed.table, TreeWalk{bring(listed)});
}

TREE_ENTRY traversal_unpack(u64 array, u64 packed, const __grid_constant__ ListedTable listed)
{
    move<false>(array, packed, listed.table, TreeWalk{bring(listed)});
}
