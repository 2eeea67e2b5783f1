// peer_exchange: a whole exchange of one rank in one launch, among GPUs that map one another's memory.
//
// A segment is a region (strided_body.cu) with the kind of transfer of its words:
//   COPY         between two arrays of this GPU
//   SEND_STAGED  packed into the peer's staging memory, then a flag per chunk in the peer's memory
//   SEND_LL      in LL packets, 4 bytes of data and the epoch in one 8-byte store, into the peer's staging memory;
//                no flag
//   SEND_WIDE    in LL128-like packets, 14 bytes of data and 2 of the epoch in one 16-byte store; no flag
//   SEND_DIRECT  into the peer's array, once the peer's exchange has begun, then a flag per chunk
//   TAKE_STAGED  unpacked from this GPU's staging memory once the flags of its chunks are set
//   TAKE_LL, TAKE_WIDE  unpacked as the packets arrive
//   TAKE_DIRECT  stored in place by the peer: the kernel only waits for the flags
//
// Blocks [0, send_blocks) process the chunks to send and to copy. The other blocks process the chunks to take. In an
// overlapped step two launches share the table: one of the copies alone (ONLY_COPIES), which has no epoch, and one
// without the copies (NO_COPIES).
//
// The epoch is the number of the launch: 1, 2, ... It is in device memory, so that a captured launch can be replayed.
// The blocks of a launch together add 1 << EPOCH_SHIFT to `state.count`, each when it ends; a block that has not ended
// yet therefore reads a count in [e - 1, e) << EPOCH_SHIFT. Epoch e uses slot e & 1 of the memory for staging and
// packets. Each rank writes the epoch that it has begun to `begun` words in its peers' memory. A peer waits for epoch e
// there before it stores directly into the rank's array in epoch e. A peer to which the rank sends nothing waits for
// epoch e - 1 before it sends in epoch e: then the rank has consumed the last contents of the slot, of epoch e - 2.
//
// Progress. Sends to staging memory and of packets wait for nothing of this epoch. A block that has waited longer than
// HELP_NS signals that this rank has begun. A block that takes then also sends the chunks that no block has begun to
// send (see `begun_chunk`) and that need not wait. So any order of blocks makes progress, as long as the GPU runs one
// block. A chunk may be sent twice: the same bytes go to the same slot before this launch ends, and no peer uses the
// slot again before that. But a second store into a peer's array could overwrite later values. So a block claims a
// chunk of SEND_DIRECT by an atomic exchange, and no other block sends it.
//
// A wait longer than `limit_ns` ends all waits of this launch and of all later launches: `state.failed` is set, and
// `failure` (in host memory) gets the number of the message and the epoch.
//
// Packets are stored and loaded in single accesses of 8 or 16 bytes: a packet with the epoch has the data of the epoch.
// LL128-like packets are sent in the tiles of ll128.cu; lane l holds words l, l + 32, ... of a tile.
//
// Bytes moved: each word is loaded and stored once on either side; packets take 2 or 8/7 times the bytes.

#ifndef TABLE_SEGMENTS
#define TABLE_SEGMENTS 1
#endif
#ifndef KINDS
#define KINDS 0x1ff  // bit k: there are segments of kind k
#endif
#ifndef POLLS
#define POLLS 64  // polls of a thread between two readings of the clock by its block
#endif
#ifndef HELP_NS
#define HELP_NS 1000000
#endif

#include "copy_work.cu"
#include "signals.cu"
#include "ll128.cu"

#define COPY 0
#define SEND_STAGED 1
#define SEND_LL 2
#define SEND_WIDE 3
#define SEND_DIRECT 4
#define TAKE_STAGED 5
#define TAKE_LL 6
#define TAKE_WIDE 7
#define TAKE_DIRECT 8

#define NO_COPIES 1
#define ONLY_COPIES 2

#define MOST_SHIFTS 16
#define EPOCH_SHIFT 12  // a launch has fewer than 2^EPOCH_SHIFT blocks

struct __align__(16) Segment {
    u64 flags;        // address of the flags: of a send in the peer's memory, of a take in this rank's
    u64 begun;        // address in this rank's memory of the peer's `begun` word if a send waits for it, or 0
    u64 slot_bytes;   // from slot 0 to slot 1
    u32 kind;
    u32 peer;         // number of the message, for `failure`
    u32 chunk_words;
    u32 flag_count;   // flags to wait for; 0 if chunk n waits for flag n alone
    u32 lag;          // number of epochs by which `begun` may be behind
    u32 shifts;       // numbers of the shifts of the source (lower half) and of the target
    Region region;

    // Whether the segment is of a kind; a compile-time constant if all sends, or all takes, are of one kind.
    template <u32 KIND>
    __device__ __forceinline__ bool is() const
    {
        constexpr u32 side = KINDS & (KIND < TAKE_STAGED ? (1u << TAKE_STAGED) - 1 : ~0u << TAKE_STAGED);
        return side == 1u << KIND || ((side >> KIND & 1) && kind == KIND);
    }
};

// A chunk of a segment. A table in device memory lists the chunks in the order of processing.
struct Chunk {
    u32 segment, number;
};

struct Segments {
#if TABLE_SEGMENTS
    Segment segment[TABLE_SEGMENTS];
#else
    const Segment* segment;
    const Chunk* chunk;
#endif
};

struct Exchange {
    u64 state;         // State
    u64 begun_chunk;   // u32[send_chunks]: the last epoch in which a block began to send the chunk
    u64 peers;         // u64[peer_count]: addresses in the peers' memory of this rank's `begun` words
    u64 failure;       // u32[2] in host memory: number of the message + 1, epoch
    u64 limit_ns;      // 0: none
    u32 peer_count, segments, send_chunks, chunks, send_blocks;
    u32 parts;         // 0, NO_COPIES or ONLY_COPIES
    u64 shift[MOST_SHIFTS];  // from each array of the table to the array of this launch; shift[0] is 0

    __device__ __forceinline__ u64 of_source(const Segment& segment) const { return shift[segment.shifts & 0xffff]; }
    __device__ __forceinline__ u64 of_target(const Segment& segment) const { return shift[segment.shifts >> 16]; }
};

struct Round {
    u32 epoch;
    u64 slot;  // 0 or 1
};

__device__ __forceinline__ void send_word(u64 at, u32 word, u32 epoch) { store_packet(at, packed_half(word, epoch)); }
__device__ __forceinline__ void send_word(u64 at, u64 word, u32 epoch)
{
    store_packets(at, packed_half(u32(word), epoch), packed_half(u32(word >> 32), epoch));
}
__device__ __forceinline__ void send_word(u64 at, Word16 word, u32 epoch)
{
    send_word(at, word.low, epoch);
    send_word(at + 16, word.high, epoch);
}

struct Packets4 {
    u64 a;
    __device__ __forceinline__ void load(u64 at) { load_packet(at, a); }
    __device__ __forceinline__ bool ready(u32 epoch) const { return u32(a >> 32) == epoch; }
    __device__ __forceinline__ u32 word() const { return u32(a); }
};
struct Packets8 {
    u64 a, b;
    __device__ __forceinline__ void load(u64 at) { load_packets(at, a, b); }
    __device__ __forceinline__ bool ready(u32 epoch) const { return u32(a >> 32) == epoch && u32(b >> 32) == epoch; }
    __device__ __forceinline__ u64 word() const { return u32(a) | (b << 32); }
};
struct Packets16 {
    Packets8 low, high;
    __device__ __forceinline__ void load(u64 at) { low.load(at); high.load(at + 16); }
    __device__ __forceinline__ bool ready(u32 epoch) const { return low.ready(epoch) && high.ready(epoch); }
    __device__ __forceinline__ Word16 word() const { return Word16{low.word(), high.word()}; }
};

template <class Word>
__device__ __forceinline__ void send_packets(
    const Region& region, u64 from, u64 base, u32 first, u32 last, u32 epoch)
{
    for (u32 start = first + threadIdx.x; start < last; start += IN_FLIGHT * blockDim.x) {
        u64 source[IN_FLIGHT], target[IN_FLIGHT];
        Word taken[IN_FLIGHT] = {};
        places<IN_FLIGHT>(region, from, base, start, blockDim.x, source, target);
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; ++i)
            if (start + i * blockDim.x < last)
                taken[i] = *at_address<const Word>(source[i]);
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; ++i)
            if (start + i * blockDim.x < last)
                send_word(target[i], taken[i], epoch);
    }
}

template <class Word>
__device__ __forceinline__ void send_wide(
    const Region& region, u64 from, u64 base, u32 first, u32 last, u32 epoch)
{
    const u32 lane = threadIdx.x & 31, words = WIDE_BYTES / sizeof(Word);
    const u32 tile = first / (32 * words) + (threadIdx.x >> 5), start = tile * 32 * words + lane;
    if (tile * 32 * words >= last)
        return;
    u64 source[words], target[words];
    Word taken[words] = {};
    places<words>(region, from, 0, start, 32, source, target);
#pragma unroll
    for (u32 i = 0; i < words; ++i)
        if (start + 32 * i < last)
            taken[i] = *at_address<const Word>(source[i]);
    Wide wide = {};
#pragma unroll
    for (u32 i = 0; i < words; ++i)
        wide.set(i, taken[i]);
    wide.send(base + region.target + u64(tile) * TILE_BYTES + 16 * lane, epoch);
}

struct Worker {
    const Segments& segments;
    const Exchange& exchange;
    const Round round;

    __device__ __forceinline__ Chunk at(u32 chunk) const
    {
#if TABLE_SEGMENTS
        u32 found = 0;
#pragma unroll
        for (u32 step = 32; step; step >>= 1)
            if (step < TABLE_SEGMENTS && found + step < exchange.segments && segments.segment[found + step].region.first_chunk <= chunk)
                found += step;
        return Chunk{found, chunk - segments.segment[found].region.first_chunk};
#else
        return segments.chunk[chunk];
#endif
    }

    // Sends a chunk; false if it must wait and `may_wait` is false, or if the wait was given up. Called by all threads
    // of the block.
    __device__ __forceinline__ bool send(u32 chunk, bool may_wait)
    {
        const Chunk at = this->at(chunk);
        const u32 number = at.number;
        const Segment& segment = segments.segment[at.segment];
        const Region& region = segment.region;
        if (exchange.parts && segment.is<COPY>() == (exchange.parts == NO_COPIES))
            return true;
        if (segment.begun) {
            const u32 wanted = round.epoch - segment.lag;
            if (!may_wait) {
                if (__syncthreads_or(threadIdx.x == 0 && !reached(segment.begun, wanted)))
                    return false;
            } else if (!wait(segment.peer, [&] { return threadIdx.x != 0 || reached(segment.begun, wanted); })) {
                return false;
            }
        }
        const u64 mark = exchange.begun_chunk + 4 * u64(chunk);
        if (segment.is<SEND_DIRECT>()) {
            bool taken = false;
            if (threadIdx.x == 0)
                taken = atomicExch((u32*)mark, round.epoch) == round.epoch;
            if (__syncthreads_or(taken))
                return true;
        } else if (threadIdx.x == 0) {
            store_loose(mark, round.epoch);
        }
        const u32 first = number * segment.chunk_words;
        const u32 left = region.words - first;
        const u32 last = first + (left < segment.chunk_words ? left : segment.chunk_words);
        const u64 base = round.slot * segment.slot_bytes, from = exchange.of_source(segment);
        if (segment.is<SEND_LL>()) {
            switch (WORD_BYTES ? WORD_BYTES : region.word_bytes) {
            case 16: send_packets<Word16>(region, from, base, first, last, round.epoch); break;
            case 8: send_packets<u64>(region, from, base, first, last, round.epoch); break;
            default: send_packets<u32>(region, from, base, first, last, round.epoch); break;
            }
            return true;
        }
        if (segment.is<SEND_WIDE>()) {
            if ((WORD_BYTES ? WORD_BYTES : region.word_bytes) == 8)
                send_wide<u64>(region, from, base, first, last, round.epoch);
            else
                send_wide<u32>(region, from, base, first, last, round.epoch);
            return true;
        }
        CopyWork{from, base + exchange.of_target(segment)}(region, first, last);
        if (!segment.is<COPY>()) {
            __syncthreads();
            if (threadIdx.x == 0)
                store_flag(segment.flags + 4 * u64(number), round.epoch);
        }
        return true;
    }

    // Takes a chunk; false if it did not arrive. Called by all threads of the block.
    __device__ __forceinline__ bool take(u32 chunk)
    {
        const Chunk at = this->at(chunk);
        const u32 number = at.number;
        const Segment& segment = segments.segment[at.segment];
        const Region& region = segment.region;
        const u32 first = number * segment.chunk_words;
        const u32 left = region.words - first;
        const u32 last = first + (left < segment.chunk_words ? left : segment.chunk_words);
        const u64 base = round.slot * segment.slot_bytes;
        if (segment.is<TAKE_LL>()) {
            switch (WORD_BYTES ? WORD_BYTES : region.word_bytes) {
            case 16: return take_packets<Packets16, Word16>(segment, base, first, last);
            case 8: return take_packets<Packets8, u64>(segment, base, first, last);
            default: return take_packets<Packets4, u32>(segment, base, first, last);
            }
        }
        if (segment.is<TAKE_WIDE>()) {
            if ((WORD_BYTES ? WORD_BYTES : region.word_bytes) == 8)
                return take_wide<u64>(segment, base, first, last);
            return take_wide<u32>(segment, base, first, last);
        }
        u32 flag = (segment.flag_count ? 0 : number) + threadIdx.x;
        const u32 flags = segment.flag_count ? segment.flag_count : number + 1;
        const bool came = wait(segment.peer, [&] {
            while (flag < flags && reached(segment.flags + 4 * u64(flag), round.epoch))
                flag += blockDim.x;
            return flag >= flags;
        });
        if (came && segment.is<TAKE_STAGED>())
            CopyWork{base, exchange.of_target(segment)}(region, first, last);
        return came;
    }

    template <class Packets, class Word>
    __device__ __forceinline__ bool take_packets(const Segment& segment, u64 base, u32 first, u32 last)
    {
        const u64 to = exchange.of_target(segment);
        for (u32 batch = first; batch < last; batch += IN_FLIGHT * blockDim.x) {
            const u32 start = batch + threadIdx.x;
            u64 source[IN_FLIGHT], target[IN_FLIGHT];
            places<IN_FLIGHT>(segment.region, base, to, start, blockDim.x, source, target);
            u32 missing = 0;
#pragma unroll
            for (u32 i = 0; i < IN_FLIGHT; ++i)
                missing |= u32(start + i * blockDim.x < last) << i;
            const bool came = wait(segment.peer, [&] {
                Packets packets[IN_FLIGHT];
#pragma unroll
                for (u32 i = 0; i < IN_FLIGHT; ++i)
                    if (missing >> i & 1)
                        packets[i].load(source[i]);
#pragma unroll
                for (u32 i = 0; i < IN_FLIGHT; ++i)
                    if ((missing >> i & 1) && packets[i].ready(round.epoch)) {
                        *at_address<Word>(target[i]) = packets[i].word();
                        missing &= ~(1u << i);
                    }
                return missing == 0;
            });
            if (!came)
                return false;
        }
        return true;
    }

    template <class Word>
    __device__ __forceinline__ bool take_wide(const Segment& segment, u64 base, u32 first, u32 last)
    {
        const u32 lane = threadIdx.x & 31, words = WIDE_BYTES / sizeof(Word);
        const u32 tile = first / (32 * words) + (threadIdx.x >> 5), start = tile * 32 * words + lane;
        u64 source[words], target[words];
        places<words>(segment.region, 0, exchange.of_target(segment), start, 32, source, target);
        const u64 packets = base + segment.region.source + u64(tile) * TILE_BYTES + 16 * lane;
        return wait(segment.peer, [&] {
            Wide wide;
            if (tile * 32 * words >= last)
                return true;
            if (!wide.take(packets, round.epoch))
                return false;
#pragma unroll
            for (u32 i = 0; i < words; ++i)
                if (start + 32 * i < last) {
                    Word word;
                    wide.get(i, word);
                    *at_address<Word>(target[i]) = word;
                }
            return true;
        });
    }

    // Waits until `ready()` is true on every thread of the block; also a barrier. Returns false if the wait was given
    // up. `ready` is not called again on a thread where it has returned true.
    template <class Ready>
    __device__ __forceinline__ bool wait(u32 peer, const Ready& ready)
    {
        bool mine = false;
        u64 since = 0, helped = 0;
        for (;;) {
            for (u32 poll = 0; poll < POLLS && !mine; ++poll)
                mine = ready();
            if (!__syncthreads_or(!mine))
                return true;
            bool over = false, late = false;
            if (threadIdx.x == 0) {
                const u64 now = nanoseconds();
                if (!since)
                    since = helped = now;
                over = load_state(exchange.state).failed != 0;
                if (!over && exchange.limit_ns && now - since > exchange.limit_ns) {
                    fail(peer);
                    over = true;
                }
                late = now - helped > HELP_NS;
                if (late)
                    helped = now;
            }
            if (__syncthreads_or(over))
                return false;
            if (__syncthreads_or(late))
                help(segments, exchange, round);
        }
    }

    __device__ __forceinline__ void fail(u32 peer)
    {
        if (atomicExch((u32*)(exchange.state + 8), 1u) == 0) {
            store_loose(exchange.failure + 4, round.epoch);
            store_flag(exchange.failure, peer + 1);
        }
    }

    // Signals that this rank has begun. A block that takes also sends the chunks that no block has begun to send.
    static __device__ __noinline__ void help(const Segments& segments, const Exchange& exchange, Round round)
    {
        Worker{segments, exchange, round}.help_out();
    }

    __device__ __forceinline__ void help_out()
    {
        announce();
        if (blockIdx.x < exchange.send_blocks)
            return;
        for (u32 some = 0; some < exchange.send_chunks; some += blockDim.x) {
            const u32 one = some + threadIdx.x;
            const bool left = one < exchange.send_chunks && load_loose(exchange.begun_chunk + 4 * u64(one)) != round.epoch;
            if (!__syncthreads_or(left))
                continue;
            for (u32 chunk = some; chunk < exchange.send_chunks && chunk < some + blockDim.x; ++chunk) {
                const bool begun =
                    threadIdx.x == 0 && load_loose(exchange.begun_chunk + 4 * u64(chunk)) == round.epoch;
                if (!__syncthreads_or(begun))
                    send(chunk, false);
            }
        }
    }

    __device__ __forceinline__ void announce()
    {
        for (u32 peer = threadIdx.x; peer < exchange.peer_count; peer += blockDim.x)
            store_loose(((const u64*)exchange.peers)[peer], round.epoch);  // relaxed: it publishes only earlier launches
    }
};

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 2) peer_exchange(
    const __grid_constant__ Segments segments, const __grid_constant__ Exchange exchange)
{
    wait_for_earlier();
    const State state = load_state(exchange.state);
    const u32 epoch = u32(state.count >> EPOCH_SHIFT) + 1;
    Worker worker{segments, exchange, Round{epoch, epoch & 1}};
    if (!state.failed) {
        if (blockIdx.x == 0 && exchange.peer_count)
            worker.announce();
        if (blockIdx.x < exchange.send_blocks) {
            for (u32 chunk = blockIdx.x; chunk < exchange.send_chunks; chunk += exchange.send_blocks)
                if (!worker.send(chunk, true))
                    break;
        } else {
            const u32 step = gridDim.x - exchange.send_blocks;
            for (u32 chunk = exchange.send_chunks + blockIdx.x - exchange.send_blocks; chunk < exchange.chunks; chunk += step)
                if (!worker.take(chunk))
                    break;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0 && exchange.parts != ONLY_COPIES)
        add_count(exchange.state, blockIdx.x ? 1 : (1u << EPOCH_SHIFT) - gridDim.x + 1);
}
