// Shared text of allreduce_array.cu and allreduce_field.cu: the ranks' memory, turns, packets and waiting.
//
// Kernels splice this file in at #include "allreduce_body.cu"; strided_body.cu gives the reason.
//
// The epoch is the number of the launch: 1, 2, ... It is in device memory (`state.count >> EPOCH_SHIFT`, plus one), so
// that a captured launch can be replayed. A block that takes a turn adds one to the count; the old count contains the
// number of the turn. The last turn of a launch adds the rest up to the next multiple of 1 << EPOCH_SHIFT.
//
// Each rank has memory that all ranks map. The memory for packets has two slots, and epoch e uses slot e & 1. Two slots
// are enough: A rank's launch for epoch e + 2 writes slot e & 1 of a peer. It follows the rank's launch for e + 1,
// which ended because it had received the packets of the peer's launch for e + 1. That launch of the peer began when
// the peer's launch for e had ended, and with it the last use of the slot. (Every launch receives packets from every
// peer.)
//
// A packet of 8 bytes carries 4 bytes of data and the epoch; it is stored and loaded in one access. Packets are sent in
// pairs.
//
// A wait longer than `limit_ns` ends all waits of this launch and of all later launches: `state.failed` becomes 1, and
// `failure` (in host memory) gets the epoch and the rank whose data did not arrive.

#ifndef POLLS
#define POLLS 64  // polls of a thread between two readings of the clock by its block
#endif
#ifndef RANKS
#define RANKS 0  // number of ranks if it is a compile-time constant, else 0
#endif
#define BATCH (RANKS && RANKS < 8 ? RANKS : 8)  // ranks whose packets a thread loads at once

#include "strided_body.cu"
#include "signals.cu"
#include "operations.cu"

#define MOST_RANKS 16
#define EPOCH_SHIFT 20  // a launch has fewer than 2^EPOCH_SHIFT turns
#define NO_TURN 0xffffffffu

struct Allreduce {
    u64 state;       // State
    u64 failure;     // u32[2] in host memory: rank + 1; epoch
    u64 limit_ns;    // 0: none
    u64 slot_bytes;  // from slot 0 to slot 1 of a rank's memory, if there are two slots
    u64 rank_bytes;  // from the place where one rank stores to the place of the next rank
    u64 flags;       // from the start of a rank's memory to its flags
    u64 source, target;
    u64 elements;
    u32 rank, ranks;
    u32 chunks, chunk_elements;
    u64 memory[MOST_RANKS];  // addresses of the ranks' memory on this GPU
};

__device__ __forceinline__ u32 ranks_of(const Allreduce& p) { return RANKS ? RANKS : p.ranks; }

// Ends all waits, also of later launches. The first caller reports the epoch and the rank to the host, in `failure`.
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

// Takes the next of a launch's `turns`; `number` is NO_TURN if a wait has been given up. Called by all threads of the
// block, with a barrier between two calls.
__device__ __forceinline__ Turn take_turn(const Allreduce& p, u32 turns)
{
    __shared__ u64 taken;
    __shared__ bool failed;
    if (threadIdx.x == 0) {
        const u64 before = load_state(p.state).failed;  // loaded first, so that both accesses overlap
        taken = take_count(p.state, 1);
        if (u32(taken & ((1u << EPOCH_SHIFT) - 1)) == turns - 1)
            add_count(p.state, (1u << EPOCH_SHIFT) - turns);
        failed = before != 0;
    }
    __syncthreads();
    return {u32(taken >> EPOCH_SHIFT) + 1, failed ? NO_TURN : u32(taken & ((1u << EPOCH_SHIFT) - 1))};
}

// Waits until `missing()` is 0 on every thread of the block; also a barrier. Returns false if the wait was given up.
// `missing` returns the number of a rank whose data has not arrived, plus one. It is not called again on a thread where
// it has returned 0.
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

// The data of pairs of packets: one element of 8 bytes or more, or several elements that fill 8 bytes.
template <class T>
union Unit {
    T value[sizeof(T) < 8 ? 8 / sizeof(T) : 1];
    u64 word[sizeof(T) > 8 ? sizeof(T) / 8 : 1];
};

template <class T>
constexpr u32 unit_elements = sizeof(T) < 8 ? 8 / sizeof(T) : 1;
template <class T>
constexpr u32 unit_words = sizeof(T) > 8 ? sizeof(T) / 8 : 1;
template <class T>
constexpr u32 unit_bytes = 16 * unit_words<T>;  // of packets

template <class T>
__device__ __forceinline__ void send_unit(u64 at, const Unit<T>& unit, u32 epoch)
{
#pragma unroll
    for (u32 i = 0; i < unit_words<T>; ++i)
        store_packets(at + 16 * i, packed_half(u32(unit.word[i]), epoch), packed_half(u32(unit.word[i] >> 32), epoch));
}

// Loads a unit, and returns whether its packets are of an epoch: then the data has arrived.
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
