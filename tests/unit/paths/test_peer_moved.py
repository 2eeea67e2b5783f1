"""Channels of the peer path reused for other arrays, of any alignment; the kernels run on the CPU."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from halox.errors import StateError
from halox.packing.refine import Level
from halox.packing.strided_plan import StridedRow
from halox.paths import stream_channel
from halox.paths.peer import channel as peer
from halox.paths.peer import endpoints
from halox.paths.peer.table import MOST_SHIFTS, Kind, both_packed
from halox.runtime.gpu import pools
from tests.fakes.cpu_kernels import aligned
from tests.fakes.cpu_peer import (
    Array,
    Flow,
    Launch,
    Rank,
    box,
    check_received,
    connect,
    few_kernels,
    multiprocessor,
    rows,
    scattered,
    without_gpu,
)
from tests.support import require

require("cxx")

HERE = threading.local()


class Running(Launch):
    """Runs the kernel in `launch`, for the rank of the current thread."""

    def launch(self, pointer: int) -> None:
        rank: Rank = HERE.rank
        parameters = []
        for argument in self.args:
            memory = aligned(ctypes.sizeof(argument))
            memory[:] = np.frombuffer(argument, np.uint8)
            parameters.append(memory)
        blocks = np.ascontiguousarray(HERE.rng.permutation(self.blocks), np.uint32)
        multiprocessor(self.defines, rank.number, 0).run(
            ctypes.c_uint(self.blocks),
            ctypes.c_uint(self.threads),
            ctypes.c_int(0),
            ctypes.c_void_p(blocks.ctypes.data),
            ctypes.c_uint(blocks.size),
            *(ctypes.c_void_p(memory.ctypes.data) for memory in parameters),
        )


def adapt(defines: Any, blocks: int, threads: int, arguments: Any) -> Running:
    found = few_kernels(defines, blocks, threads, arguments)
    return Running(found.defines, found.blocks, found.threads, found.args)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    stream = SimpleNamespace(ptr=7, synchronize=lambda: None)
    runtime = SimpleNamespace(eventRecord=lambda *_: None, streamWaitEvent=lambda *_: None)
    cuda = SimpleNamespace(runtime=runtime, get_current_stream=lambda: stream)
    side = SimpleNamespace(stream=stream, before=stream, after=stream)
    pool = SimpleNamespace(acquire=lambda device: side, release=lambda device, item: None)
    monkeypatch.setattr(stream_channel, "cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(pools, "SIDE_STREAMS", pool)
    with without_gpu(1, adapt):
        yield


CUBE = (8, 9, 10)
FLOWS = {
    "staging": [
        Flow(0, 1, "staging", [(box(CUBE, (8, 9, 1), (0, 0, 8)), box(CUBE, (8, 9, 1), (0, 0, 0)))])
    ],
    "ll": [
        Flow(0, 1, "ll", [(box(CUBE, (8, 1, 10), (0, 7, 0)), box(CUBE, (8, 1, 10), (0, 0, 0)))])
    ],
    "wide": [Flow(0, 1, "ll", [(rows((300,), (16,), 8), rows((300,), (24,), 8))])],
    "odd runs": [
        Flow(0, 1, "staging", [(rows((7,), (103,), 61), rows((7,), (99,), 61, offset=2))])
    ],
    "scattered": [
        Flow(
            0,
            1,
            "staging",
            [
                (
                    scattered([8] * 70, [24 * k * k for k in range(70)]),
                    scattered([8] * 70, [16 * k * k for k in range(70)]),
                )
            ],
        )
    ],
    "two fields both ways": [
        Flow(
            a,
            b,
            way,
            [
                (box(CUBE, (1, 9, 10), (6, 0, 0)), box(CUBE, (1, 9, 10), (0, 0, 0))),
                (box(CUBE, (1, 9, 10), (6, 0, 0), 4), box(CUBE, (1, 9, 10), (7, 0, 0), 4)),
            ],
        )
        for a, b, way in ((0, 1, "ll"), (1, 0, "staging"))
    ],
}


def channels_of(flows: Sequence[Flow], **options: Any) -> tuple[list[Rank], list[peer.PeerChannel]]:
    ranks = connect(flows, adapt=adapt, **options)
    return ranks, [peer.PeerChannel(rank.draft) for rank in ranks]


def moved_to(rank: Rank, offset: int, number: int) -> None:
    """Replace a rank's arrays; the first one is ``offset`` bytes from a multiple of 256, the others are aligned."""
    arrays = []
    for i, (old, layout) in enumerate(zip(rank.arrays, rank.layouts, strict=True)):
        block = rank.arena.allocate(layout.span, layout.offset + (offset if not i else 16 * number))
        arrays.append(Array(rank.arena.bytes_of(block), block.pointer))
        assert old.pointer != block.pointer
    rank.arrays = arrays


def exchange(
    ranks: Sequence[Rank],
    channels: Sequence[peer.PeerChannel],
    epoch: int,
    is_moved: bool = True,
) -> None:
    """Exchange the current arrays of the ranks once, and check the result."""
    by_number = {rank.number: rank for rank in ranks}

    def work(rank: Rank, channel: peer.PeerChannel) -> None:
        HERE.rank, HERE.rng = rank, np.random.default_rng((rank.number, epoch))
        rank.fill(epoch)
        if is_moved:
            channel.bind(channel.views([array.pointer for array in rank.arrays]))
        channel.run()
        assert rank.failure == (0, 0), f"rank {rank.number}, epoch {epoch}"
        check_received(rank, by_number, epoch)

    with ThreadPoolExecutor(len(ranks)) as pool:
        for future in [pool.submit(work, *pair) for pair in zip(ranks, channels, strict=True)]:
            future.result()


@pytest.mark.parametrize("name", FLOWS)
def test_other_arrays_of_any_alignment(name: str, streams: None) -> None:
    """Exchange arrays of different alignments on the two ranks, and the first arrays again."""
    with patch.object(endpoints, "WIDE_BYTES", 1) if name == "wide" else nullcontext():
        ranks, channels = channels_of(FLOWS[name])
    assert all(channel.is_movable for channel in channels)
    assert (Kind.SEND_WIDE in ranks[0].kinds) == (name == "wide")
    home = [rank.arrays for rank in ranks]
    steps = [(0, 0), (16, 32), (8, 0), (0, 4), (1, 2), (256, 16), (8, 8)]
    for epoch, offsets in enumerate(steps, 1):
        for rank, first, offset in zip(ranks, home, offsets, strict=False):
            rank.arrays = first
            if offset:
                moved_to(rank, offset, epoch)
        exchange(ranks, channels, epoch)
        for rank in ranks:
            rank.arena.check_guards()
    for channel in channels:
        channel.close()
        channel.free()


def test_copies_within_a_rank(streams: None) -> None:
    """The kernel makes the copies as long as the arrays are aligned to its words."""
    side = box(CUBE, (8, 9, 1), (0, 0, 8)), box(CUBE, (8, 9, 1), (0, 0, 0))
    ranks, channels = channels_of([*FLOWS["ll"], Flow(0, 0, "copy", [side])])
    assert Kind.COPY in ranks[0].kinds
    for epoch in (1, 2, 3):
        for rank in ranks[: epoch % 2 + 1]:
            moved_to(rank, 16 * epoch, epoch)
        exchange(ranks, channels, epoch)


def test_alignment_alone_asks_for_buffers(streams: None) -> None:
    """Misaligned arrays need buffers, which are allocated once; aligned arrays do not use them."""
    ranks, channels = channels_of(FLOWS["ll"])
    blocks = [len(channel._agreed._own) for channel in channels]
    for epoch, offset in enumerate((16, 8, 0, 4, 32, 8), 1):
        for rank in ranks:
            moved_to(rank, offset, epoch)
        exchange(ranks, channels, epoch)
        for channel in channels:
            assert (channel._current is channel._unbuffered) == (offset % 16 == 0)
    for channel, before in zip(channels, blocks, strict=True):
        assert len(channel._agreed._own) == before + 2  # the buffers, and memory for a second table
        assert (
            not channel._unbuffered.before
            and len(channel._buffered.before) + len(channel._buffered.after) == 1
        )


def test_buffers_are_not_made_in_a_capture(streams: None) -> None:
    ranks, channels = channels_of(FLOWS["staging"])
    (pointer,) = [array.pointer for array in ranks[0].arrays]
    with patch("halox.runtime.gpu.streams.is_capturing", lambda stream=None: True):
        with pytest.raises(StateError, match="captured"):
            channels[0].views([pointer + 8])
        assert channels[0].views([pointer + 16])[0] is channels[0]._unbuffered


def test_arrays_that_peers_write_to_stay(streams: None) -> None:
    side = box(CUBE, (1, 9, 10), (6, 0, 0))
    _, channels = channels_of([Flow(0, 1, "direct", [(side, side)])])
    assert [channel.is_movable for channel in channels] == [False, False]


@pytest.mark.parametrize(("fields", "is_movable"), [(MOST_SHIFTS - 1, True), (MOST_SHIFTS, False)])
def test_many_fields(fields: int, is_movable: bool, streams: None) -> None:
    """A plan with more arrays than the kernel's limit on shifts works, but cannot be reused for other arrays."""
    side = box((4, 6), (4, 1), (0, 4)), box((4, 6), (4, 1), (0, 0))
    ranks, channels = channels_of([Flow(0, 1, "staging", [side] * fields)])
    assert [channel.is_movable for channel in channels] == [is_movable] * 2
    if is_movable:
        for rank in ranks:
            moved_to(rank, 16, 1)
    exchange(ranks, channels, 1, is_movable)


def test_a_row_with_both_sides_packed() -> None:
    row = StridedRow(1000, 48, 8, (Level(5, 320, 64), Level(8, 8, 8)))
    assert both_packed(row, 1) == StridedRow(48, 48, 8, (Level(5, 64, 64), Level(8, 8, 8)))
    assert both_packed(row, 0) == StridedRow(1000, 1000, 8, (Level(5, 320, 320), Level(8, 8, 8)))
