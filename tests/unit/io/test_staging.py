"""Parts of arrays on a GPU through two page-locked buffers, on fake streams that work late or immediately."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from halox.decomposition.blocks import blocks
from halox.runtime.gpu import cuda, pools, staging


class Stream:
    """A stream that runs its work, in order, when it is waited for; immediately if ``eager``."""

    ptr = 3

    def __init__(self, eager: bool) -> None:
        self.eager, self.work, self.waited = eager, [], []
        self.done = 0

    def put(self, action: Callable[[], Any]) -> None:
        self.work.append(action)
        if self.eager:
            self.run(len(self.work))

    def run(self, upto: int) -> None:
        while self.done < upto:
            self.done += 1
            self.work[self.done - 1]()

    def synchronize(self) -> None:
        self.run(len(self.work))

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)

    def __enter__(self) -> Stream:
        Gpu.current.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        Gpu.current.pop()


class Event:
    def __init__(self, **_: Any) -> None:
        self.stream: Any = None
        self.upto = 0

    def record(self, stream: Any) -> None:
        self.stream, self.upto = stream, len(getattr(stream, "work", ()))

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.run(self.upto)


class Array:
    """An array in device memory: only work on a stream accesses it.

    It is made of NumPy's array, or, as cupy.ndarray, of a shape, a dtype, memory and strides.
    """

    device = SimpleNamespace(id=0)

    def __init__(
        self, values: Any, dtype: Any = None, memory: Any = None, strides: Any = None
    ) -> None:
        if memory is not None:
            first = np.ndarray((1,), dtype, memory.owner.data)
            values = np.lib.stride_tricks.as_strided(first, values, strides)
        self.values = values
        self.data = SimpleNamespace(ptr=values.__array_interface__["data"][0], owner=values)

    shape = property(lambda self: self.values.shape)
    ndim = property(lambda self: self.values.ndim)
    dtype = property(lambda self: self.values.dtype)
    strides = property(lambda self: self.values.strides)
    nbytes = property(lambda self: self.values.nbytes)

    def __getitem__(self, index: Any) -> Array:
        return Array(self.values[index])

    def __setitem__(self, index: Any, value: Array) -> None:
        target = self.values[index]
        Gpu.current[-1].put(lambda: np.copyto(target, value.values))


class Gpu:
    """Takes the place of CuPy and page-locked memory."""

    current: list[Any]

    def __init__(self, eager: bool) -> None:
        Gpu.current = [SimpleNamespace(put=lambda action: action(), ptr=0)]
        self.side = SimpleNamespace(stream=Stream(eager), before=Event())
        self.copies: list[tuple[str, int]] = []
        self.made: list[np.ndarray] = []
        module: Any = ModuleType("cupy")
        module.ndarray, module.ascontiguousarray = Array, self.contiguous
        module.empty = lambda shape, dtype: Array(np.empty(shape, dtype))
        module.cuda = SimpleNamespace(
            runtime=SimpleNamespace(
                memcpyAsync=self.copy, memcpyHostToDevice="up", memcpyDeviceToHost="down"
            ),
            Event=Event,
            Device=lambda number: contextlib.nullcontext(),
            get_current_stream=lambda: self.current[0],
        )
        self.module = module

    def contiguous(self, part: Array) -> Array:
        found = Array(np.empty(part.shape, part.dtype))
        self.current[-1].put(lambda: np.copyto(found.values, part.values))
        return found

    def copy(self, target: int, source: int, nbytes: int, kind: str, stream: int) -> None:
        assert stream == self.side.stream.ptr
        self.copies.append((kind, nbytes))
        self.side.stream.put(lambda: ctypes.memmove(target, source, nbytes))

    def pinned(self, nbytes: int) -> SimpleNamespace:
        array = np.full(nbytes, 0xEE, np.uint8)
        self.made.append(array)
        return SimpleNamespace(array=array, nbytes=nbytes, close=lambda: None)


@pytest.fixture(params=[True, False], ids=["early", "late"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    found = Gpu(request.param)
    monkeypatch.setitem(sys.modules, "cupy", found.module)
    monkeypatch.setattr(cuda, "why_no_gpu", lambda: None)
    monkeypatch.setattr(pools, "pinned", found.pinned)
    pools.SIDE_STREAMS.release(0, found.side)  # the next that is acquired
    pools._buffers.cache_clear()
    yield found
    pools._buffers.cache_clear()
    pools.SIDE_STREAMS._free.clear()


DTYPES = ["f8", "u2", "V5", [("a", "f4"), ("b", "u1")]]


def numbers(dtype: Any) -> np.ndarray:
    """Return an array of random bytes, of any dtype."""
    dtype = np.dtype(dtype)
    raw = np.random.default_rng(1).integers(0, 256, (7, 5, 6, dtype.itemsize), np.uint8)
    return raw.view(f"V{dtype.itemsize}")[..., 0].view(dtype)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("most", [4, 30, 1000])
def test_read(dtype: Any, most: int, gpu: Gpu) -> None:
    values = numbers(dtype)
    indices = list(blocks(values.shape, most))
    copied = []
    with staging.DeviceStaging(Array(values), most * values.itemsize) as staged:
        assert gpu.side.stream.waited == [gpu.side.before], "the caller's work comes first"
        for number, part in enumerate(staged.read(iter(indices))):
            assert same(part, values[indices[number]]) and part.dtype == values.dtype
            assert part.shape == values[indices[number]].shape
            copied.append(len(gpu.copies))
            part.view(np.uint8)[...] = 0  # later parts must not contain these zeros
    ahead = [min(number + 2, len(indices)) for number in range(len(indices))]
    assert copied == ahead, "the next part is under way while the host has this one"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("most", [4, 30, 1000])
def test_put_and_store(dtype: Any, most: int, gpu: Gpu) -> None:
    values = numbers(dtype)
    target = np.zeros_like(values)
    with staging.DeviceStaging(Array(target), most * values.itemsize) as staged:
        for number, index in enumerate(blocks(values.shape, most)):
            part = values[index].copy()
            if number % 2:
                staged.store(index, part.view(f"V{part.itemsize}"))
            else:
                raw = f"V{part.itemsize}"
                staged.next_buffer(part.shape).view(raw)[...] = part.view(raw)
                staged.put(index)
            part.view(np.uint8)[...] = 0
    assert same(target, values)


def test_buffers_are_used_again(gpu: Gpu) -> None:
    """Buffers are reused, except long buffers and buffers of a failed call, which may still receive a message."""
    values = numbers("f8")

    def stage(part_bytes: int) -> None:
        with staging.DeviceStaging(Array(values), part_bytes) as staged:
            if part_bytes == 1000:
                raise ValueError
            assert same(next(staged.read([()])), values)

    for part_bytes, made in ((4000, 2), (70_000, 4), (50_000, 4), (17 << 20, 6), (17 << 20, 8)):
        stage(part_bytes)
        assert len(gpu.made) == made
    with pytest.raises(ValueError):
        stage(1000)
    stage(4000)
    assert len(gpu.made) == 10
