"""Trial of a network adapter for ``scatter_gather/mlx5_umr``, and its times; ``halox probe mlx5`` prints them.

The trial writes between two connections of this process, with the same keys as the path, and checks the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import numpy as np

from halox import datatypes as dt
from halox.errors import PathError
from halox.paths.messages import Message, Part
from halox.paths.scatter_gather.mlx5.engine import MemoryKey, Mlx5Engine
from halox.paths.scatter_gather.mlx5.keys import KeyPool
from halox.paths.scatter_gather.mlx5.windows import ENTRIES, MOST_STRIDE, MessageBlocks, Window
from halox.runtime import mlx5
from halox.runtime.gpu import cuda
from halox.runtime.gpu.dmabuf import flush_writes
from halox.runtime.waiting import Waiter, timeout_s

_REPEATS = 100
_GUARD = 0xA5
_GPU_BYTES, _GPU_OFFSET, _GPU_BLOCK = 2 << 20, 512, 1 << 10

_CASES = (
    ("strided", 16, 1 << 10, 2 << 10),
    ("strided", 64, 1 << 10, 2 << 10),
    ("strided", 4096, 256, 1 << 10),
    ("strided", 512, 4 << 10, 8 << 10),
    ("list", ENTRIES, 1 << 10, MOST_STRIDE + 1),
    ("list", ENTRIES, 32 << 10, 2 * (MOST_STRIDE + 1)),
    ("contiguous", 1, 64, 64),
    ("contiguous", 1, 4 << 20, 4 << 20),
)
"""Kind of key; blocks, bytes of each, and bytes from one to the next."""


def collect() -> dict[str, object]:
    """Return the adapter, the limits of its keys and the figures; raises `HaloxError` if the adapter does not work."""
    adapter = mlx5.open_adapter()
    limit_s = timeout_s()
    pair = [Mlx5Engine(n, adapter, lambda: Waiter(limit_s, crowded=True)) for n in (0, 1)]
    addresses = [engine.invite([1 - n])[1 - n] for n, engine in enumerate(pair)]
    for n, engine in enumerate(pair):
        engine.connect({1 - n: addresses[1 - n]})
    rows = [_measure(pair, *case) for case in _CASES]
    begin = time.perf_counter()
    pool = KeyPool(pair[0])
    make_key_us = (time.perf_counter() - begin) * 1e6 / pool.free
    pool.close()
    dmabuf = _dmabuf(pair)
    for engine in pair:
        engine.close()
    return {
        "works": all(row["bytes_right"] for row in rows),
        "device": adapter.name,
        "firmware": adapter.firmware,
        "port": "RoCE v2" if adapter.address.gid else "InfiniBand",
        "most_message_bytes": adapter.max_message_bytes,
        "entries_of_a_key": ENTRIES,
        "most_stride_bytes": MOST_STRIDE,
        "make_key_us": make_key_us,
        "gpu_memory_by_dmabuf": dmabuf,
        "rows": rows,
    }


def _measure(
    pair: Sequence[Mlx5Engine], kind: str, count: int, block: int, stride: int
) -> dict[str, object]:
    """Write one window from one key to another, repeatedly, and return the timings."""
    blocks = MessageBlocks.of(Message(1, "send", (Part(0, dt.vector(count, block, stride, "u1")),)))
    arrays = [np.full(count * stride, _GUARD, "u1") for _ in pair]
    arrays[0][:] = np.arange(count * stride) * 37 % 251
    keys: list[MemoryKey] = []
    regions = []
    map_us = []
    for engine, array in zip(pair, arrays, strict=True):
        region = engine.register(array.ctypes.data, array.nbytes)
        key = engine.make_key()
        (window,) = blocks.windows(count * block, [array.ctypes.data], [region])
        map_us += [_map_us(engine, key, window) for _ in range(3)]
        keys.append(key)
        regions.append(region)
    times = []
    for number in range(_REPEATS):
        begin = time.perf_counter()
        pair[0].write(1, keys[1].rkey, number, keys[0])
        pair[0].complete()
        times.append(time.perf_counter() - begin)
        if pair[1].arrivals() != [(0, number)]:
            raise PathError(
                f"the adapter has completed a write whose number {number} did not arrive"
            )
    sent, received = (array.reshape(count, stride) for array in arrays)
    is_right = (received[:, :block] == sent[:, :block]).all()
    is_right = is_right and (received[:, block:] == _GUARD).all()
    for engine, key, region in zip(pair, keys, regions, strict=True):
        engine.destroy_key(key)
        engine.deregister(region)
    seconds = median(times)
    return {
        "key": kind,
        "blocks": count,
        "block_bytes": block,
        "map_us": median(map_us),
        "write_us": seconds * 1e6,
        "GB_per_s": count * block / seconds / 1e9,
        "bytes_right": bool(is_right),
    }


def _map_us(engine: Mlx5Engine, key: MemoryKey, window: Window) -> float:
    begin = time.perf_counter()
    engine.map(key, window)
    return (time.perf_counter() - begin) * 1e6


def _dmabuf(pair: Sequence[Mlx5Engine]) -> str:
    """Return whether the adapter can read and write GPU memory, by writes from the host to the GPU and back."""
    if not cuda.gpu_count():
        return "not tried: no usable GPU"
    cp = cuda.cupy()
    # Like fields, the array does not begin at a page boundary.
    there = cp.full(_GPU_BYTES, _GUARD, "u1")[_GPU_OFFSET:]
    sent, received = np.arange(there.size) * 37 % 251, np.full(there.size, _GUARD, "u1")
    sent = sent.astype("u1")
    half = there.size // 2
    kind = dt.vector(half // _GPU_BLOCK, _GPU_BLOCK, 2 * _GPU_BLOCK, "u1")
    blocks = MessageBlocks.of(Message(1, "send", (Part(0, kind),)))
    device = int(there.device.id)
    ends = [(sent, int(sent.ctypes.data), None), (there, int(there.data.ptr), device)]
    ends.append((received, int(received.ctypes.data), None))
    cp.cuda.Device().synchronize()
    try:
        regions = [
            engine.register(at, int(array.nbytes), where)
            for engine, (array, at, where) in zip((pair[0], pair[1], pair[0]), ends, strict=True)
        ]
    except PathError as error:
        return f"no: {error}"
    for source, target, first in ((0, 1, 0), (1, 2, 1)):
        engines = pair if not first else pair[::-1]
        keys = []
        for engine, end in zip(engines, (source, target), strict=True):
            key = engine.make_key()
            (window,) = blocks.windows(kind.size, [ends[end][1]], [regions[end]])
            engine.map(key, window)
            keys.append(key)
        engines[0].write(1 - first, keys[1].rkey, 1, keys[0])
        engines[0].complete()
        if [number for _, number in engines[1].arrivals()] != [1]:
            return "no: a write to its memory did not arrive"
        flush_writes(device)
        for engine, key in zip(engines, keys, strict=True):
            engine.destroy_key(key)
    for engine, region in zip((pair[0], pair[1], pair[0]), regions, strict=True):
        engine.deregister(region)
    inside = np.arange(there.size) // _GPU_BLOCK % 2 == 0
    inside[kind.extent :] = False
    wanted = np.where(inside, sent, _GUARD)
    is_right = (received == wanted).all() and (there.get() == wanted).all()
    return "yes" if is_right else "no: other bytes arrived than were sent"
