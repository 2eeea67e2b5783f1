"""Channels of the peer path: other arrays of any alignment, failures, and the end; the kernels run on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from halox.errors import ExchangeTimeoutError, StateError
from halox.paths.peer import endpoints
from halox.paths.peer.channel import PeerChannel
from halox.paths.peer.table import MOST_SHIFTS, Kind
from halox.runtime.gpu import pools
from tests.fakes.cpu_peer import (
    Array,
    Flow,
    Launch,
    Rank,
    at_once,
    check_received,
    connect,
    few_kernels,
    without_gpu,
)
from tests.fakes.host_cuda import HostCuda, host_cuda
from tests.fakes.layouts import box, rows, scattered
from tests.support import require

require("cxx")

HERE = threading.local()


class Running(Launch):
    """Runs the kernel in `launch`, for the rank of the current thread."""

    def launch(self, pointer: int) -> None:
        self.run(HERE.rank.number, HERE.rng.permutation(self.blocks))


def adapt(*given: Any) -> Running:
    found = few_kernels(*given)
    return Running(found.defines, found.blocks, found.threads, found.args)


@pytest.fixture(autouse=True)
def gpu() -> Iterator[HostCuda]:
    with without_gpu(1, adapt) as found:
        yield found


CUBE = (8, 9, 10)
FACE = box(CUBE, (8, 9, 1), (0, 0, 8)), box(CUBE, (8, 9, 1), (0, 0, 0))
EDGE = box(CUBE, (8, 1, 10), (0, 7, 0)), box(CUBE, (8, 1, 10), (0, 0, 0))
ODD = rows((7,), (103,), 61), rows((7,), (99,), 61, offset=2)
SCATTERED = [scattered([8] * 70, [step * k * k for k in range(70)]) for step in (24, 16)]
BOTH_WAYS = [
    (box(CUBE, (1, 9, 10), (6, 0, 0)), box(CUBE, (1, 9, 10), (0, 0, 0))),
    (box(CUBE, (1, 9, 10), (6, 0, 0), 4), box(CUBE, (1, 9, 10), (7, 0, 0), 4)),
]
FLOWS = {
    "staging": [Flow(0, 1, "staging", [FACE])],
    "ll": [Flow(0, 1, "ll", [EDGE])],
    "wide": [Flow(0, 1, "ll", [(rows((300,), (16,), 8), rows((300,), (24,), 8))])],
    "odd runs": [Flow(0, 1, "staging", [ODD])],
    "scattered": [Flow(0, 1, "staging", [tuple(SCATTERED)])],
    "two fields both ways": [Flow(0, 1, "ll", BOTH_WAYS), Flow(1, 0, "staging", BOTH_WAYS)],
}


def channels_of(flows: Sequence[Flow]) -> tuple[list[Rank], list[PeerChannel]]:
    ranks = connect(flows, adapt=adapt)
    return ranks, [PeerChannel(rank.draft) for rank in ranks]


def moved_to(rank: Rank, offset: int, number: int) -> None:
    """Replace a rank's arrays; the first one is ``offset`` bytes from a multiple of 256, the others are aligned."""
    arrays = []
    for i, layout in enumerate(rank.layouts):
        block = rank.arena.allocate(layout.span, layout.offset + (16 * number if i else offset))
        arrays.append(Array(rank.arena.bytes_of(block), block.pointer))
    rank.arrays = arrays


def exchange(
    ranks: Sequence[Rank],
    channels: Sequence[PeerChannel],
    epoch: int,
    is_moved: bool = True,
    overlaps: bool = False,
) -> None:
    """Exchange the current arrays of the ranks once, and check the result; ``overlaps`` makes the copies first."""
    by_number = {rank.number: rank for rank in ranks}

    def work(pair: tuple[Rank, PeerChannel]) -> None:
        rank, channel = pair
        HERE.rank, HERE.rng = rank, np.random.default_rng((rank.number, epoch))
        rank.fill(epoch)
        if is_moved:
            channel.bind(channel.views([array.pointer for array in rank.arrays]))
        if overlaps:
            channel.start_copied()
            channel.finish()
        else:
            channel.run()
        assert rank.failure == (0, 0), f"rank {rank.number}, epoch {epoch}"
        check_received(rank, by_number, epoch)

    at_once(work, [*zip(ranks, channels, strict=True)])


@pytest.mark.parametrize("name", FLOWS)
def test_other_arrays_of_any_alignment(name: str) -> None:
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


def test_copies_within_a_rank() -> None:
    """The kernel makes the copies as long as the arrays are aligned to its words."""
    ranks, channels = channels_of([*FLOWS["ll"], Flow(0, 0, "copy", [FACE])])
    assert Kind.COPY in ranks[0].kinds
    for epoch, offset in enumerate((16, 32, 48, 0, 4, 8, 16, 0), 1):
        for rank in ranks[: epoch % 2 + 1]:
            moved_to(rank, offset, epoch)
        exchange(ranks, channels, epoch, overlaps=epoch > 2)


def test_buffers_are_made_once_and_not_in_a_capture(gpu: HostCuda) -> None:
    """Only misaligned arrays need buffers."""
    ranks, (channel, _) = channels_of(FLOWS["staging"])
    ((pointer, aligned),) = [(array.pointer, array.pointer + 16) for array in ranks[0].arrays]
    gpu.capturing.add(gpu.current.ptr)
    with pytest.raises(StateError, match="captured"):
        channel.views([pointer + 8])
    assert channel.views([aligned])[0] is channel.views([pointer])[0]
    gpu.capturing.clear()
    buffered = channel.views([pointer + 8])[0]
    assert channel.views([aligned])[0] is not buffered
    assert channel.views([pointer + 4])[0] is buffered


def test_arrays_that_peers_write_to_stay() -> None:
    _, channels = channels_of([Flow(0, 1, "direct", [FACE])])
    assert [channel.is_movable for channel in channels] == [False, False]


@pytest.mark.parametrize(("fields", "is_movable"), [(MOST_SHIFTS - 1, True), (MOST_SHIFTS, False)])
def test_many_fields(fields: int, is_movable: bool) -> None:
    """A plan with more arrays than the kernel's limit on shifts works, but cannot be reused for other arrays."""
    side = box((4, 6), (4, 1), (0, 4)), box((4, 6), (4, 1), (0, 0))
    ranks, channels = channels_of([Flow(0, 1, "staging", [side] * fields)])
    assert [channel.is_movable for channel in channels] == [is_movable] * 2
    if is_movable:
        for rank in ranks:
            moved_to(rank, 16, 1)
    exchange(ranks, channels, 1, is_movable)


@pytest.mark.parametrize("is_finished", [False, True])
def test_memory_is_given_back_last(is_finished: bool) -> None:
    """`close` waits for the kernel; the memory is released by `free`, since peers may still write to it."""
    ranks, _ = channels_of(FLOWS["ll"])
    released: list[Any] = []
    ranks[0].arena.release = released.append  # type: ignore[method-assign]
    with host_cuda(seed=1) as gpu:
        channel = PeerChannel(ranks[0].draft)
        ended: list[bool] = []
        launch = channel._current.concurrent
        launch.launch = lambda pointer: gpu.at(pointer).put(lambda: ended.append(True))
        channel.start()
        if is_finished:
            channel.finish()
        channel.close()
        assert ended and not gpu.at(channel._side.stream.ptr).queue
        assert not channel.has_failed and not released
        channel.free()
        assert released


def test_a_failure() -> None:
    """Later calls raise it. `close` warns of one that nobody was told of, and has the plan keep its arrays."""
    for is_raised in (True, False):
        ranks, (channel, _) = channels_of(FLOWS["ll"])
        before = pools.count_failures()
        ranks[0].draft.failure.words[0], ranks[0].draft.failure.words[1] = 1, 5
        assert pools.count_failures() == before + 1
        text = "rank 0 has waited for rank 1 in exchange 5"
        if is_raised:
            with pytest.raises(ExchangeTimeoutError, match=text):
                channel.run()
            channel.close()
        else:
            with pytest.warns(UserWarning, match=text):
                channel.close()
        assert channel.has_failed and pools.count_failures() == before
