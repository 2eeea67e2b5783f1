// Shared text of allreduce_array.cu and allreduce_field.cu: the ranks' memory, turns, packets and waiting.
//
// Spliced in where a kernel says #include "allreduce_body.cu"; see strided_body.cu for why.
//
// The epoch is that of this launch: 1, 2, ... It lives in device memory (`state.count >> EPOCH_SHIFT`, plus one), so
// that a captured launch can be replayed. Whoever takes a turn adds one to the count and so learns its number; the
// last turn of a launch adds what is missing to the next multiple of 1 << EPOCH_SHIFT.
//
// Each rank has memory that all map. What comes in packets has two slots; that of epoch & 1 is used. Two are enough. A
// rank's launch for epoch e + 2 writes to slot e & 1 of a peer. It comes after the rank's launch for e + 1, which ended
// because it had got what the peer sent in its launch for e + 1; and that one began when the peer's launch for e had
// ended, and with it the last use of the slot. Every launch gets something from every peer.
//
// Packets carry 4 bytes of data and the epoch in 8 bytes that are stored and loaded in one piece. Two travel at once.
//
// A wait longer than `limit_ns` ends all waits of this launch and of those to come: `state.failed` becomes 1, and
// `failure` (in host memory) says which rank did not come, and the epoch.

#ifndef POLLS
#define POLLS 64  // looks of a thread between two looks of its block at the clock
#endif
#ifndef RANKS
#define RANKS 0  // where it is not 0: how many there are, known to the compiler
#endif
#define BATCH (RANKS && RANKS < 8 ? RANKS : 8)  // ranks whose packets a thread loads at once

#include "strided_body.cu"
#include "signals.cu"
#include "operations.cu"

#define MOST_RANKS 16
#define EPOCH_SHIFT 20  // more than the turns of a launch, as a power of two
#define NO_TURN 0xffffffffu

struct Allreduce {
    u64 state;       // State
    u64 failure;     // u32[2] in host memory: rank + 1; epoch
    u64 limit_ns;    // 0: none
    u64 slot_bytes;  // from slot 0 to slot 1 of a rank's memory, where there are two
    u64 rank_bytes;  // from what one rank stores there to what the next one does
    u64 flags;       // from the start of a rank's memory to its flags
    u64 source, target;
    u64 elements;
    u32 rank, ranks;
    u32 chunks, chunk_elements;
    u64 memory[MOST_RANKS];  // addresses here of the ranks' memory
};

__device__ __forceinline__ u32 ranks_of(const Allreduce& p) { return RANKS ? RANKS : p.ranks; }

// Ends all waits for good; whoever is the first tells the host of a rank, as in `failure`.
__device__ __forceinline__ void give_up(const Allreduce& p, u32 epoch, u32 who)
{
    if (atomicExch((u32*)(p.state + 8), 1u) != 1) {
        store_loose(p.failure + 4, epoch);
        store_flag(p.failure, who);
    }
}

struct Turn {
    u32 epoch, number;
};

// Takes the next of a launch's `turns`; `number` is NO_TURN once a wait was given up. All threads of the block, which
// must have met a barrier since the last time.
__device__ __forceinline__ Turn take_turn(const Allreduce& p, u32 turns)
{
    __shared__ u64 taken;
    __shared__ bool failed;
    if (threadIdx.x == 0) {
        const u64 before = load_state(p.state).failed;  // before, so that both are on their way at once
        taken = take_count(p.state, 1);
        if (u32(taken & ((1u << EPOCH_SHIFT) - 1)) == turns - 1)
            add_count(p.state, (1u << EPOCH_SHIFT) - turns);
        failed = before != 0;
    }
    __syncthreads();
    return {u32(taken >> EPOCH_SHIFT) + 1, failed ? NO_TURN : u32(taken & ((1u << EPOCH_SHIFT) - 1))};
}

// Waits until `missing()` is 0 on every thread of the block, which also is a barrier; false if the wait ended without.
// It returns the number of a rank that has not come, plus one, and is not called again on a thread where it was 0.
template <class Missing>
__device__ __forceinline__ bool wait(const Allreduce& p, u32 epoch, const Missing& missing)
{
    u32 from = 1;
    u64 since = 0;
    for (;;) {
        for (u32 poll = 0; poll < POLLS && from; ++poll)
            from = missing();
        if (!__syncthreads_or(from != 0))
            return true;
        bool over = false;
        if (threadIdx.x == 0) {
            const u64 now = nanoseconds();
            if (!since)
                since = now;
            over = load_state(p.state).failed || (p.limit_ns && now - since > p.limit_ns);
        }
        if (!__syncthreads_or(over))
            continue;
        if (from)
            give_up(p, epoch, from);
        return false;
    }
}

// What travels in one or two pairs of packets: one element, or several that fill 8 bytes.
template <class T>
union Unit {
    T value[sizeof(T) < 8 ? 8 / sizeof(T) : 1];
    u64 word[sizeof(T) == 16 ? 2 : 1];
};

template <class T>
constexpr u32 unit_elements = sizeof(T) < 8 ? 8 / sizeof(T) : 1;
template <class T>
constexpr u32 unit_words = sizeof(T) == 16 ? 2 : 1;
template <class T>
constexpr u32 unit_bytes = 16 * unit_words<T>;  // of packets

template <class T>
__device__ __forceinline__ void send_unit(u64 at, const Unit<T>& unit, u32 epoch)
{
#pragma unroll
    for (u32 i = 0; i < unit_words<T>; ++i)
        store_packets(at + 16 * i, packed_half(u32(unit.word[i]), epoch), packed_half(u32(unit.word[i] >> 32), epoch));
}

// Whether the unit of an epoch has come, and if so what it is.
template <class T>
__device__ __forceinline__ bool take_unit(u64 at, Unit<T>& unit, u32 epoch)
{
    bool came = true;
#pragma unroll
    for (u32 i = 0; i < unit_words<T>; ++i) {
        u64 low, high;
        load_packets(at + 16 * i, low, high);
        came &= u32(low >> 32) == epoch && u32(high >> 32) == epoch;
        unit.word[i] = u32(low) | high << 32;
    }
    return came;
}
