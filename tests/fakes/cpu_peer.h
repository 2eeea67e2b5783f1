// The memory accesses of signals.cu as atomic accesses of the CPU, for g++.
//
// A library with this header acts as one multiprocessor: it runs its blocks one after another, on one CPU thread.
// Copies of the library are multiprocessors that run at the same time. Accesses may be delayed at random, to vary the
// order of events between ranks and between multiprocessors.
#pragma once

#include "cpu_shim.h"

typedef unsigned int u32;
typedef unsigned long long u64;
struct State;
struct Word16;

static struct {
    u64 random;
    u32 permille;  // share of delayed accesses
} delays;

static void maybe_wait()
{
    if (!delays.permille)
        return;
    u64& x = delays.random;
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    if (x % 1000 < delays.permille)
        (x >> 20) % 8 ? (void)sched_yield() : (void)usleep((x >> 24) % 300);
}

template <class Value>
static Value* checked(u64 at)
{
    if (!at || at % sizeof(Value))
        fail_on_cpu("a flag or a packet at no multiple of its size");
    maybe_wait();
    return (Value*)at;
}

static u32 load_flag(u64 at) { return __atomic_load_n(checked<u32>(at), __ATOMIC_ACQUIRE); }
static void store_flag(u64 at, u32 value) { __atomic_store_n(checked<u32>(at), value, __ATOMIC_RELEASE); }
static u32 load_loose(u64 at) { return __atomic_load_n(checked<u32>(at), __ATOMIC_RELAXED); }
static void store_loose(u64 at, u32 value) { __atomic_store_n(checked<u32>(at), value, __ATOMIC_RELAXED); }

// Each packet of 8 bytes has its own epoch, so that two packets need not be accessed together. Here they never are, and
// either one may be first.
static bool second_first;

static void load_packet(u64 at, u64& packet) { packet = __atomic_load_n(checked<u64>(at), __ATOMIC_RELAXED); }
static void store_packet(u64 at, u64 packet) { __atomic_store_n(checked<u64>(at), packet, __ATOMIC_RELAXED); }
static void load_packets(u64 at, u64& first, u64& second)
{
    checked<unsigned __int128>(at);
    second_first = !second_first;
    if (second_first)
        load_packet(at + 8, second);
    load_packet(at, first);
    if (!second_first)
        load_packet(at + 8, second);
}
static void store_packets(u64 at, u64 first, u64 second)
{
    checked<unsigned __int128>(at);
    second_first = !second_first;
    if (second_first)
        store_packet(at + 8, second);
    store_packet(at, first);
    if (!second_first)
        store_packet(at + 8, second);
}

static Word16 load_wide(u64 at);
static void store_wide(u64 at, u64 low, u64 high)
{
    const unsigned __int128 packet = (unsigned __int128)high << 64 | low;
    __atomic_store_n(checked<unsigned __int128>(at), packet, __ATOMIC_RELAXED);
}

static State load_state(u64 at);
static void add_count(u64 at, u64 value) { __atomic_fetch_add(checked<u64>(at), value, __ATOMIC_RELAXED); }
[[maybe_unused]] static u64 take_count(u64 at, u64 value) { return __atomic_fetch_add(checked<u64>(at), value, __ATOMIC_ACQ_REL); }
static u32 atomicExch(u32* at, u32 value) { return __atomic_exchange_n(checked<u32>((u64)at), value, __ATOMIC_SEQ_CST); }
// Of shared memory, which the threads of a block access one after another.
[[maybe_unused]] static void atomicAdd(u64* at, u64 value) { *at += value; }
[[maybe_unused]] static void atomicMax(u32* at, u32 value) { *at = value > *at ? value : *at; }

// A waiting block calls this function. It sleeps, since the ranks that it waits for need the CPU.
static u64 nanoseconds()
{
    usleep(100);
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}

// Runs some of a launch's blocks, in the given order.
template <class Kernel, class... Args>
static void launch_blocks(u32 grid, u32 threads, bool backwards, const u32* blocks, u32 count, Kernel kernel,
                          const Args&... args)
{
    the_block.kernel = [&] { kernel(args...); };
    gridDim.x = grid;
    blockDim.x = threads;
    for (u32 i = 0; i < count; ++i) {
        blockIdx.x = blocks[i];
        run_block(threads, backwards);
    }
    the_block.kernel = nullptr;
}
