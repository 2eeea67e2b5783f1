"""Trial of a network adapter for ``scatter_gather/mlx5_umr``, and its times; ``halox probe mlx5`` prints them.

The trial writes between two connections of this process, with the same keys as the path, and checks the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import numpy as np

from halox import datatypes as dt
from halox.errors import PathError
from halox.paths.messages import Message, Part
from halox.paths.scatter_gather.mlx5.engine import MemoryKey, Mlx5Engine
from halox.paths.scatter_gather.mlx5.windows import ENTRIES, MOST_STRIDE, MessageBlocks
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

_End = tuple[Mlx5Engine, int, int, int | None]
"""Engine, and address, bytes and GPU of the memory of one end."""


def collect() -> dict[str, object]:
    """Return the adapter, the limits of its keys and the figures; raises `HaloxError` if the adapter does not work."""
    adapter = mlx5.open_adapter()
    limit_s = timeout_s()
    pair = [Mlx5Engine(n, adapter, lambda: Waiter(limit_s, crowded=True)) for n in (0, 1)]
    addresses = [engine.invite([1 - n])[1 - n] for n, engine in enumerate(pair)]
    for n, engine in enumerate(pair):
        engine.connect({1 - n: addresses[1 - n]})
    rows = [_measure(pair, *case) for case in _CASES]
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
        "gpu_memory_by_dmabuf": dmabuf,
        "rows": rows,
    }


def _blocks(count: int, block: int, stride: int) -> MessageBlocks:
    return MessageBlocks.of(Message(1, "send", (Part(0, dt.vector(count, block, stride, "u1")),)))


@contextmanager
def _keys(blocks: MessageBlocks, *ends: _End) -> Iterator[list[MemoryKey]]:
    """Register the memory of each end, and map a key to the blocks there."""
    made = []
    for engine, address, nbytes, device in ends:
        region, key = engine.register(address, nbytes, device), engine.make_key()
        (window,) = blocks.windows(blocks.nbytes, [address], [region])
        engine.map(key, window)
        made.append((engine, key, region))
    yield [key for _, key, _ in made]
    for engine, key, region in made:
        engine.destroy_key(key)
        engine.deregister(region)


def _write(pair: Sequence[Mlx5Engine], to: int, keys: Sequence[MemoryKey], number: int) -> None:
    """Write from the first key to the second, of engine ``to``, and wait for the number there."""
    pair[1 - to].write(to, keys[1].rkey, number, keys[0])
    pair[1 - to].complete()
    if pair[to].arrivals() != [(1 - to, number)]:
        raise PathError(f"the adapter has completed a write whose number {number} did not arrive")


def _measure(
    pair: Sequence[Mlx5Engine], kind: str, count: int, block: int, stride: int
) -> dict[str, object]:
    """Write one window from one key to another, repeatedly, and return the timings."""
    arrays = [np.full(count * stride, _GUARD, "u1") for _ in pair]
    arrays[0][:] = np.arange(count * stride) * 37 % 251
    ends = [(e, a.ctypes.data, a.nbytes, None) for e, a in zip(pair, arrays, strict=True)]
    times, begin = [], time.perf_counter()
    with _keys(_blocks(count, block, stride), *ends) as keys:
        key_s = (time.perf_counter() - begin) / 2
        for number in range(_REPEATS):
            begin = time.perf_counter()
            _write(pair, 1, keys, number)
            times.append(time.perf_counter() - begin)
    sent, received = (array.reshape(count, stride) for array in arrays)
    is_right = (received[:, :block] == sent[:, :block]).all()
    is_right = is_right and (received[:, block:] == _GUARD).all()
    seconds = median(times)
    return {
        "key": kind,
        "blocks": count,
        "block_bytes": block,
        "key_us": key_s * 1e6,
        "write_us": seconds * 1e6,
        "GB_per_s": count * block / seconds / 1e9,
        "bytes_right": bool(is_right),
    }


def _dmabuf(pair: Sequence[Mlx5Engine]) -> str:
    """Return whether the adapter can read and write GPU memory, by writes from the host to the GPU and back."""
    if not cuda.gpu_count():
        return "not tried: no usable GPU"
    cp = cuda.cupy()
    # Like fields, the array does not begin at a page boundary.
    there = cp.full(_GPU_BYTES, _GUARD, "u1")[_GPU_OFFSET:]
    sent = (np.arange(there.size) * 37 % 251).astype("u1")
    received = np.full(there.size, _GUARD, "u1")
    count, device = there.size // 2 // _GPU_BLOCK, int(there.device.id)
    on_gpu = int(there.data.ptr), int(there.nbytes), device
    cp.cuda.Device().synchronize()
    try:
        for to, source, target in (
            (1, (sent.ctypes.data, sent.nbytes, None), on_gpu),
            (0, on_gpu, (received.ctypes.data, received.nbytes, None)),
        ):
            ends = (pair[1 - to], *source), (pair[to], *target)
            with _keys(_blocks(count, _GPU_BLOCK, 2 * _GPU_BLOCK), *ends) as keys:
                _write(pair, to, keys, 1)
            flush_writes(device)
    except PathError as error:
        return f"no: {error}"
    inside = np.arange(there.size) // _GPU_BLOCK % 2 == 0
    inside[(2 * count - 1) * _GPU_BLOCK :] = False
    wanted = np.where(inside, sent, _GUARD)
    is_right = (received == wanted).all() and (there.get() == wanted).all()
    return "yes" if is_right else "no: other bytes arrived than were sent"
