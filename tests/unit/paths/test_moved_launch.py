"""A plan of the local path reused for another array, by shifted addresses; the kernel runs on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from halox import pack
from halox.decomposition import FieldLayout, FieldSpec, decompose
from halox.errors import StateError
from halox.exchange.halo import halo_draft
from halox.packing import device as packing
from halox.packing.refine import Copy
from halox.packing.strided_plan import plan
from halox.paths.base import Job
from halox.paths.launches import PackingWithCopies
from halox.paths.local import LocalDeviceChannel
from halox.runtime.arrays import describe
from tests.fakes.cpu_kernels import aligned, run
from tests.support import require

require("cxx")


class OnCpu:
    """Takes the place of StridedCopy."""

    made = 0

    def __init__(self, copies: Sequence[Copy], *, device: int, mark: Any = None) -> None:
        OnCpu.made += 1
        self.planned = plan(copies, sms=4)
        self.nbytes = self.planned.nbytes

    def launch(self, stream: Any = None, source: int = 0, target: int = 0) -> None:
        run("strided_copy", self.planned, source=source, target=target)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "StridedCopy", OnCpu)
    stream = SimpleNamespace(ptr=0)
    cuda = SimpleNamespace(get_current_stream=lambda: stream)
    monkeypatch.setattr("halox.paths.local.cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr("halox.runtime.gpu.streams.is_capturing", lambda stream=None: False)
    OnCpu.made = 0


HALO = ((1, 1), (2, 1), (1, 2))
SHAPE = (6, 9, 5)


def job_of(arrays: Sequence[np.ndarray]) -> Job:
    layout = FieldLayout(decompose(SHAPE, 1, periodic=True), 0, FieldSpec(HALO))
    found = [replace(describe(array), device=0) for array in arrays]
    draft = halo_draft(
        tuple(arrays), [(one, layout) for one in found], operation="copy", corners=True
    )
    return Job(found, draft.sends, draft.receives)


def channel_of(arrays: Sequence[np.ndarray]) -> LocalDeviceChannel:
    return LocalDeviceChannel(job_of(arrays), 0)


def array_at(dtype: str, offset: int = 0) -> np.ndarray:
    """Return an array at an address ``offset`` bytes beyond a multiple of 256."""
    shape = [n + low + high for n, (low, high) in zip(SHAPE, HALO, strict=True)]
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return aligned(nbytes, offset).view(dtype).reshape(shape)


def filled(array: np.ndarray, *seed: int) -> np.ndarray:
    """Fill the cells of an array; returns the expected array, with its halo."""
    inner = tuple(slice(low, n + low) for n, (low, _) in zip(SHAPE, HALO, strict=True))
    cells = np.random.default_rng(seed).integers(1, 200, SHAPE).astype(array.dtype)
    array[...] = 0
    array[inner] = cells
    return np.pad(cells, HALO, mode="wrap")


def check(channel: LocalDeviceChannel, arrays: Sequence[np.ndarray], seed: int) -> None:
    """Exchange arrays by the channel, and compare with NumPy."""
    wanted = [filled(array, seed, number) for number, array in enumerate(arrays)]
    channel.bind(channel.views([array.ctypes.data for array in arrays]))
    channel.start()
    assert all(map(np.array_equal, arrays, wanted))


@pytest.mark.parametrize("dtype", ["f8", "u1", "c16"])
def test_a_moved_channel_exchanges_the_other_array(dtype: str) -> None:
    arrays = [array_at(dtype) for _ in range(3)]
    arrays.sort(key=lambda array: array.ctypes.data)
    first = arrays.pop(1)  # the other two have lower and higher addresses
    channel = channel_of([first])
    assert channel.is_movable
    for number, array in enumerate((*arrays, first, *arrays)):
        check(channel, [array], number)
    assert OnCpu.made == 1


@pytest.mark.parametrize("offset", [1, 2, 4, 8, 24])
def test_an_array_of_another_alignment(offset: int) -> None:
    """The shorter words need a second table, once."""
    dtype = f"u{offset}" if offset < 8 else "f8"
    channel = channel_of([array_at(dtype)])
    for number in range(4):
        check(channel, [array_at(dtype, offset * (number % 2))], number)
    assert OnCpu.made == 2


def test_several_arrays_move_each_by_itself() -> None:
    dtypes = ["f8", "u1", "c16"]
    first = [array_at(dtype) for dtype in dtypes]
    channel = channel_of(first)
    assert channel.is_movable and OnCpu.made == 1
    rng = np.random.default_rng(5)
    for number in range(4):
        others = [array_at(dtype, 16 * int(rng.integers(8))) for dtype in dtypes]
        check(channel, others, number)
        check(channel, [first[0], others[1], first[2]], number)
        check(channel, first, number)
    assert OnCpu.made == 1 + len(dtypes)


def test_no_table_is_made_while_a_stream_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    first = array_at("f8")
    channel = channel_of([first])
    monkeypatch.setattr("halox.runtime.gpu.streams.is_capturing", lambda stream=None: True)
    check(channel, [array_at("f8", 16)], 0)
    with pytest.raises(StateError):
        channel.views([first.ctypes.data + 8])
    check(channel, [first], 1)


def test_packing_with_copies_in_one_launch() -> None:
    """The first array needs one launch; another array needs two.

    Copies shift source and target, packing shifts the source only, so that one launch cannot do both with other shifts.
    """
    arrays = [array_at("f8", 16 * number) for number in range(2)]
    job = job_of(arrays[:1])
    (send, *_), pairs = job.sends[0].parts, [*job.pairs()]
    packed = np.zeros(send.nbytes, np.uint8)
    made = PackingWithCopies(job, [(send, packed.ctypes.data)], pairs, 0)
    OnCpu.made = 0
    for number in (0, 1, 0, 1):
        array = arrays[number]
        wanted = filled(array, number)
        oracle = pack(array, send.datatype, send.count)
        packed[:] = 0
        made.bind(made.view([array.ctypes.data]))
        made.launch(0)
        assert np.array_equal(array, wanted) and packed.tobytes() == oracle.tobytes()
        assert len(made.stages[0]) == number + 1
    assert OnCpu.made == 2
