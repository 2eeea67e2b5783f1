"""The peer kernel, compiled as C++ and run on the CPU with one thread per rank: protocol and data."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from math import gcd
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halox import datatypes as dt
from halox.packing import tiles
from halox.packing.refine import Copy, paired
from halox.paths.messages import Message, Part
from halox.paths.peer import endpoints as peer_endpoints
from halox.paths.peer import table as peer_plan
from halox.paths.peer.table import Kind, least_word, runs
from tests.fakes.cpu_peer import ORDERS, Array, Flow, as_planned, at_once, connect, exchange
from tests.fakes.layouts import Layout, box, rows, scattered
from tests.support import becomes, full, require, trials

require("cxx")


@contextmanager
def limited(wide_bytes=None, **of_table):
    """Plan with other limits: the least bytes for LL128-like packets, and constants of `halox.paths.peer.table`."""
    with ExitStack() as stack:
        if wide_bytes is not None:
            stack.enter_context(patch.object(peer_endpoints, "WIDE_BYTES", wide_bytes))
        for name, value in of_table.items():
            stack.enter_context(patch.object(peer_plan, name, value))
        yield


def there_and_back(way: str, sent: Layout, received: Layout) -> list[Flow]:
    """Return the same message in both directions."""
    return [Flow(0, 1, way, [(sent, received)]), Flow(1, 0, way, [(sent, received)])]


def faces(itemsize: int) -> tuple[Layout, Layout]:
    """Return the cells at the high end of an axis, and the halo at its low end: more bytes than a chunk has."""
    shape, subsizes = (30, 20, 12), (28, 18, 3)
    return box(shape, subsizes, (1, 1, 6), itemsize), box(shape, subsizes, (1, 1, 0), itemsize)


# Runs of odd lengths at odd addresses, at the sender and the receiver.
RUNS = rows((3, 7), (900, 101), 77, 1), rows((21,), (79,), 77, 6)
LONG_RUNS = rows((2, 2), (9001, 3001), 2500, 3), rows((4,), (2503,), 2500, 5)

SENT = {
    "staging": Kind.SEND_STAGED,
    "ll": Kind.SEND_LL,
    "wide": Kind.SEND_WIDE,
    "direct": Kind.SEND_DIRECT,
}
TAKEN = {
    "staging": Kind.TAKE_STAGED,
    "ll": Kind.TAKE_LL,
    "wide": Kind.TAKE_WIDE,
    "direct": Kind.TAKE_DIRECT,
}


@pytest.fixture
def way(request):
    """Return the protocol of the test's messages; "wide" is "ll" with LL128-like packets for all messages."""
    with limited(1 if request.param == "wide" else None):
        yield "ll" if request.param == "wide" else request.param


ALL_WAYS = pytest.mark.parametrize("way", SENT, indirect=True)


@pytest.mark.part(2)
class TestWays:
    @pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
    @pytest.mark.parametrize("kind", SENT)
    def test_words_of_any_width(self, kind, itemsize):
        packets = kind in ("ll", "wide")
        if packets and itemsize < 4:
            return  # packets need words of 4 bytes or more
        with limited(1 if kind == "wide" else None):
            ranks = connect(there_and_back("ll" if packets else kind, *faces(itemsize)), sms=2)
        assert all(rank.kinds == {SENT[kind], TAKEN[kind]} for rank in ranks)
        words = ranks[0].planned.segments["region"]["word_bytes"]
        assert words[0] == min(itemsize, 8 if packets else 16)
        exchange(ranks)

    @pytest.mark.parametrize("runs", [RUNS, LONG_RUNS])
    @pytest.mark.parametrize("way", ["staging", "direct"])
    def test_runs_of_no_alignment(self, way, runs):
        ranks = connect(there_and_back(way, *runs))
        assert 0 in ranks[0].planned.segments["region"]["word_bytes"]
        exchange(ranks)

    @pytest.mark.parametrize("lengths", [(12, 20), (16, 4, 32), (6, 2), (3, 16, 5)])
    @pytest.mark.parametrize("way", ["ll", "wide", "staging"], indirect=True)
    def test_parts_of_odd_lengths_that_are_collected(self, way, lengths):
        """The gaps between the parts of a message are not sent, and the receiver does not wait for them."""
        word = gcd(*lengths)
        if way != "staging" and word < 4:
            return  # packets need words of 4 bytes or more
        dtype = {4: 4, 2: 2, 1: 1}[min(word, 4)]
        parts = [(box((n + 5 * dtype,), (n // dtype,), (2,), dtype),) * 2 for n in lengths]
        flows = [Flow(a, 1 - a, way, parts) for a in (0, 1)]
        exchange(connect(flows, operation="add"))

    @pytest.mark.parametrize("levels", [1, 3, 4, 5])
    @ALL_WAYS
    def test_levels(self, way, levels):
        shape = (4, 3, 4, 3, 5)[:levels]
        sent = box(shape, [n - 1 for n in shape], [1] * levels)
        received = box(shape, [n - 1 for n in shape], [0] * levels)
        ranks = connect(there_and_back(way, sent, received))
        assert ranks[0].planned.levels == (3 if levels < 4 else 5)
        exchange(ranks, 3)

    @pytest.mark.parametrize("where", ["launch", "memory"])
    @ALL_WAYS
    def test_messages_of_several_segments(self, way, where):
        """Parts of several fields, with different levels and word widths, and copies within a rank."""
        parts = [faces(8), faces(4), (box((9, 9), (7, 1), (1, 7)), box((9, 9), (7, 1), (1, 0)))]
        if way != "ll":
            parts += [faces(1), RUNS]
        flows = [Flow(a, 1 - a, way, parts) for a in (0, 1)]
        flows += [Flow(a, a, "copy", [faces(16), RUNS]) for a in (0, 1)]
        with limited(**{"INLINE_CHUNKS": 0} if where == "memory" else {"TABLE_BYTES": 3800}):
            ranks = connect(flows, sms=2)
            assert bool(ranks[0].planned.inline) == (where == "launch")
            exchange(ranks, 3)

    @pytest.mark.parametrize("itemsize", [*full(4), 8, 16])
    @ALL_WAYS
    def test_the_kernel_that_a_gpu_would_run(self, way, itemsize):
        """Kernels with compile-time word width, and with several words in flight."""
        flows = there_and_back(way, *faces(itemsize))
        with limited(SMALL_WORDS=0 if itemsize == 8 else 1 << 16):
            ranks = connect(flows, adapt=as_planned)
        packets = 8 if way == "ll" else 16
        assert dict(ranks[0].launch.defines)["WORD_BYTES"] == str(min(itemsize, packets))
        exchange(ranks, 3)

    @pytest.mark.parametrize("first", [2**16 - 3, 2**31 - 3, 2**32 - 3], ids="from {}".format)
    @ALL_WAYS
    def test_epochs_that_wrap_around(self, way, first):
        """Epochs in LL128-like packets wrap around after 16 bits, other epochs after 32 bits."""
        flows = [*there_and_back(way, *faces(8)), Flow(0, 2, way, [faces(4)])]
        exchange(connect(flows), 6, first=first)

    @pytest.mark.parametrize("where", ["launch", "memory"])
    @pytest.mark.parametrize(
        ("way", "ends"),
        [
            ("staging", faces(8)),
            ("direct", [box((90, 9, 9), (88, 8, 8), (1, 1, start)) for start in (0, 1)]),
        ],
    )
    def test_more_chunks_than_threads(self, way, ends, where):
        """A block that helps to send then searches for chunks several times."""
        in_memory = {"INLINE_CHUNKS": 0} if where == "memory" else {}
        with limited(CHUNK_BYTES=(32, 64), DIRECT_CHUNK_BYTES=(64, 64), **in_memory):
            ranks = connect(there_and_back(way, *ends))
            assert bool(ranks[0].planned.inline) == (where == "launch")
        assert ranks[0].planned.send_chunks > ranks[0].launch.threads
        exchange(ranks, 2, order=("backward", "random"))

    @pytest.mark.parametrize("nbytes", [8, 1784, 1792, 1800, 20000])
    @ALL_WAYS
    def test_not_a_byte_more_than_the_message(self, way, nbytes):
        """Full tiles and chunks, and one word more or less."""
        line = rows((), (), nbytes)
        exchange(connect(there_and_back(way, line, line)), 3)


# Regular blocks of different shapes at both ends. Both pack in the same order, so that both have the same chunks.
ALIKE = (
    (rows((40,), (64,), 48), rows((60,), (40,), 32)),
    (rows((24,), (168,), 160), rows((96,), (44,), 40)),
    (rows((40, 5), (500, 24), 16), rows((2, 400), (3300, 8), 4)),
    (rows((), (), 9000), rows((1500,), (12,), 6)),
)
# Irregular runs at one or both ends, or runs of bytes: the chunks of both ends differ.
LINE = rows((), (), 9000)
UNLIKE = (
    (scattered((2600, 1400, 24, 4976), (0, 4000, 3000, 6000)), LINE),
    (LINE, scattered((8, 2992, 6000), (20000, 4, 3000))),
    (scattered((2600, 6400), (0, 4000)), scattered((3000, 6000), (0, 4000))),
    (RUNS[0], rows((), (), 21 * 77, 3)),
    (rows((21,), (78,), 77), RUNS[1]),
)


class TestEnds:
    """Sender and receiver have different datatypes of equal size."""

    @pytest.mark.parametrize(
        ("ends", "is_alike"), [(e, True) for e in ALIKE] + [(e, False) for e in UNLIKE]
    )
    def test_staging(self, ends, is_alike):
        """A chunk waits for its own flag if both ends have the same chunks, else for all flags of the sender."""
        ranks = connect(there_and_back("staging", *ends))
        taken = ranks[0].planned.segments["kind"] == Kind.TAKE_STAGED
        wanted = 0 if is_alike else ranks[0].planned.send_chunks
        assert set(ranks[0].planned.segments["flag_count"][taken].tolist()) == {wanted}
        exchange(ranks)

    def test_chunks_of_other_sizes(self):
        """Chunks per flag are larger for words of 16 bytes than for words of 8 bytes."""
        ends = rows((64,), (272,), 256), rows((64,), (264,), 256)
        with limited(CHUNK_BYTES=(64, 128), LONG_CHUNK_BYTES=1024):
            ranks = connect(there_and_back("staging", *ends), sms=2)
        assert ranks[0].planned.chunks == 64 + 128
        exchange(ranks)

    @pytest.mark.parametrize(
        ("ends", "is_wide"),
        [(ALIKE[0], True), (ALIKE[2], True), (ALIKE[1], False), *[(e, False) for e in UNLIKE[:3]]],
    )
    def test_packets(self, ends, is_wide):
        """Packets stay narrow unless the words of both ends are equal."""
        with limited(1):
            ranks = connect(there_and_back("ll", *ends))
        kinds = {True: {Kind.SEND_WIDE, Kind.TAKE_WIDE}, False: {Kind.SEND_LL, Kind.TAKE_LL}}
        assert ranks[0].kinds == kinds[is_wide]
        exchange(ranks)

    @pytest.mark.parametrize("ends", [*ALIKE, UNLIKE[3]])
    def test_straight_into_another_layout(self, ends):
        exchange(connect(there_and_back("direct", *ends)))

    @pytest.mark.parametrize("itemsize", [1, *full(4), 8, 16])
    @pytest.mark.parametrize("turned", ["sent", "received", "both"])
    @pytest.mark.parametrize("way", ["staging", "direct"])
    @pytest.mark.part(3)
    def test_axes_in_another_order(self, way, turned, itemsize):
        """Copies that permute axes use tiles: between an array and the packed message, or between two arrays."""
        n, m = 68, 41
        columns = rows((n, m), (itemsize, itemsize * n), itemsize)
        padded = rows((n, m), (itemsize * (m + 4), itemsize), itemsize)
        ends = {
            "sent": (columns, padded),
            "received": (padded, columns),
            "both": (columns, columns),
        }
        with patch.object(tiles, "LEAST_BYTES", 1):
            ranks = connect(there_and_back(way, *ends[turned]), sms=2)
        assert bool(ranks[0].planned.tiled) == (turned != "both" or way == "staging")
        exchange(ranks, 3)

    @pytest.mark.parametrize("way", ["staging", "ll"])
    def test_types_that_the_kernel_does_not_walk(self, way):
        """Messages of unsupported types are packed to a buffer, at one end or both."""
        rng = np.random.default_rng(3)
        starts = np.cumsum(rng.integers(2, 5, 100)) * 8
        blocks, line = scattered([8] * 100, starts.tolist()), rows((), (), 800)
        for ends in ((blocks, line), (line, blocks), (blocks, blocks)):
            ranks = connect(there_and_back(way, *ends))
            exchange(ranks, 3)
            assert ranks[0].before or ranks[0].after


@pytest.mark.part(2)
class TestRanks:
    @pytest.mark.parametrize("late", [None, 0, 1])
    @pytest.mark.parametrize("order", ORDERS)
    @ALL_WAYS
    @pytest.mark.part(4)
    def test_one_way(self, way, order, late):
        """No message in the other direction tells the sender the receiver's epoch, so that it waits for a flag."""
        ranks = connect([Flow(0, 1, way, [faces(8), faces(4)])])
        exchange(ranks, 6, order=order, late_s=None if late is None else {late: 0.01})

    @pytest.mark.parametrize("orders", [("forward", "backward", "random"), ("backward",) * 3])
    @ALL_WAYS
    def test_a_ring_of_one_way_messages(self, way, orders):
        flows = [Flow(a, (a + 1) % 3, way, [faces(8)]) for a in range(3)]
        exchange(connect(flows, sms=2), 6, order=orders, late_s={1: 0.003})

    @pytest.mark.parametrize("multiprocessors", [1, 2])
    @pytest.mark.parametrize("orders", [("backward", "random", "forward"), ("backward",) * 3])
    def test_all_ways_at_once(self, orders, multiprocessors):
        """Three ranks, several messages between two ranks, some in one direction only, with random delays."""
        ways = ["staging", "ll", "direct"]
        flows = [Flow(a, a, "copy", [faces(4)]) for a in range(3)]
        for a, b in ((0, 1), (1, 0), (1, 2), (2, 0)):
            for tag, way in enumerate(ways if a < b else ways[1:]):
                flows.append(Flow(a, b, way, [faces(8), faces(4)], tag))
        flows.append(Flow(2, 1, "ll", [(rows((), (), 20000),) * 2], 7))
        with limited(20000):
            ranks = connect(flows, sms=2, multiprocessors=multiprocessors)
        assert set().union(*(rank.kinds for rank in ranks)) == set(Kind)
        exchange(ranks, 4, order=orders, delays=2)

    @pytest.mark.parametrize("ways", [("ll", "direct"), ("direct", "staging")])
    def test_a_kernel_of_some_kinds(self, ways):
        """Each rank's kernel is compiled for its own kinds of segments; the kinds of the two ranks differ."""
        flows = [Flow(0, 0, "copy", [faces(8)])]
        flows += [Flow(0, 1, ways[0], [faces(8)]), Flow(1, 0, ways[1], [faces(8)])]
        ranks = connect(flows, adapt=as_planned)
        kinds = [int(dict(rank.launch.defines)["KINDS"]) for rank in ranks]
        assert kinds == [sum(1 << kind for kind in rank.kinds) for rank in ranks]
        exchange(ranks, 3)

    @pytest.mark.parametrize(("way", "itemsize"), [("ll", 16), ("wide", 8)], indirect=["way"])
    def test_packets_that_come_slowly(self, way, itemsize):
        """One half of a word arrives before the other half."""
        exchange(connect([Flow(0, 1, way, [faces(itemsize)])]), 4, delays=40)

    def test_beside_other_work(self):
        """The launch for overlap has fewer blocks; here on one rank only."""
        cells = (40, 30, 29)
        ends = box((40, 30, 30), cells, (0, 0, 0)), box((40, 30, 30), cells, (0, 0, 1))
        with limited(1, SMALL_WORDS=0):
            ranks = connect(there_and_back("ll", *ends), concurrent=(0,))
        assert [rank.launch.blocks for rank in ranks] == [4, 8]
        exchange(ranks, 3)

    @pytest.mark.parametrize("way", ["ll", "staging", "direct"])
    def test_copies_in_a_launch_of_their_own(self, way):
        """Rank 0 overlaps: its copies are in one launch, before or after its messages in another one."""
        flows = [Flow(0, 0, "copy", [faces(8), faces(4)]), Flow(1, 1, "copy", [faces(8)])]
        ranks = connect([*flows, *there_and_back(way, *faces(8))], sms=2, apart=(0,))
        exchange(ranks, 8, order=("random", "backward"), delays=5)
        with pytest.raises(AssertionError):
            ranks[0].only_copies = None
            exchange(ranks, 1, first=9)

    def test_arrays_are_not_written_twice(self):
        """Receiving blocks that run first help to send; the sending blocks must not send the same chunks again."""
        with limited(DIRECT_CHUNK_BYTES=(64, 64)):
            ranks = connect(there_and_back("direct", *faces(16)), sms=2)
        exchange(ranks, 8, order=("forward", "backward"), late_s={0: 0.004}, delays=100)

    @pytest.mark.parametrize("multiprocessors", [2, 3])
    @ALL_WAYS
    def test_blocks_at_once(self, way, multiprocessors):
        """Receiving blocks help to send while sending blocks run."""
        ranks = connect(there_and_back(way, *faces(8)), sms=3, multiprocessors=multiprocessors)
        exchange(ranks, 6, order=("random", "backward"), delays=5)


class TestWaiting:
    @pytest.mark.parametrize("limit_s", [0, 100])
    def test_a_rank_that_is_late_is_waited_for(self, limit_s):
        """No wait is limited if the limit is 0."""
        ranks = connect(there_and_back("staging", *faces(8)), limit_s=limit_s)
        exchange(ranks, 2, late_s={1: 0.1})

    @ALL_WAYS
    def test_a_rank_that_never_comes_is_named(self, way):
        """The error names the missing rank; later launches end at once and keep the first failure."""
        flows = []
        for other in (1, 2, 3):
            chosen = way if other == 2 else "staging"
            flows += [Flow(0, other, "staging", [faces(4)]), Flow(other, 0, chosen, [faces(8)])]
        ranks = connect(flows)
        exchange(ranks, 1)

        def run(rank):
            if rank.number:
                rank.run()
                return
            assert becomes(lambda: all((ranks[i].begun_chunks == 2).all() for i in (1, 3)))
            time.sleep(0.2)  # ranks 1 and 3 finish sending
            rank.limit(1.0)
            start = time.monotonic()
            rank.run()
            assert time.monotonic() - start >= 1.0

        at_once(run, [ranks[0], ranks[1], ranks[3]])
        number, epoch = ranks[0].failure
        assert number - 1 == len(ranks[0].job.sends) + 1 and epoch == 2
        assert "rank 0 has waited for rank 2 in exchange 2 of" in str(ranks[0].draft.error())
        assert ranks[1].failure == ranks[3].failure == (0, 0)
        ranks[0].limit(1000)
        ranks[0].run()
        assert ranks[0].failure == (number, epoch) and ranks[0].epochs == 3
        for rank in ranks:
            rank.check()

    @pytest.mark.parametrize(("way", "last"), [("staging", 2), ("ll", 2), ("direct", 1)])
    def test_a_rank_that_is_waited_for_to_begin_is_named(self, way, last):
        """A sender in one direction waits for the receiver to begin an epoch, and names it at the time limit.

        With "direct", the receiver must have begun the same epoch, since the sender writes to its array. With "staging"
        and "ll", the previous epoch is enough.
        """
        ranks = connect([Flow(0, 1, way, [faces(8)])])
        exchange(ranks, 1)
        before = ranks[1].arrays[0].data.copy()
        ranks[0].limit(0.2)
        for _ in range(last):
            assert ranks[0].failure == (0, 0)
            ranks[0].run()
        assert ranks[0].failure == (1, last + 1)
        assert ranks[1].arrays[0].data.tobytes() == before.tobytes()

    @pytest.mark.parametrize("way", ["staging", "ll", "wide"], indirect=True)
    def test_what_was_sent_before_is_not_taken_twice(self, way):
        """A receiver whose sender is missing must not accept flags and packets of earlier epochs."""
        ranks = connect([Flow(0, 1, way, [faces(8)])])
        exchange(ranks, 3)
        ranks[1].limit(0.1)
        before = ranks[1].arrays[0].data.copy()
        ranks[1].run()
        assert ranks[1].failure == (1, 4)
        assert ranks[1].arrays[0].data.tobytes() == before.tobytes()


def widths(way: str, ends: tuple[Layout, Layout]) -> int:
    """Return the shorter of the word widths at both ends, by which halox chooses the protocol."""
    found = 16
    for layout in ends:
        message = Message(0, "send", (Part(0, layout.datatype),))
        found = min(
            found,
            peer_endpoints.peer_info(message, [Array(np.empty(0), layout.offset)], None).word_bytes,
        )
    return found


@st.composite
def layouts(draw, factors: list[int], unit: int) -> Layout:
    """Draw disjoint strided blocks; the stride of each level exceeds the span of the inner levels."""
    dealt = draw(st.permutations(factors))
    cuts = sorted(draw(st.lists(st.integers(0, len(dealt)), max_size=3)))
    *outer, block = [
        int(np.prod(dealt[a:b], dtype=int))
        for a, b in zip([0, *cuts], [*cuts, len(dealt)], strict=True)
    ]
    block *= unit
    span, strides = block, []
    for steps in reversed(outer):
        step = span + unit * draw(st.sampled_from([0, 0, 1, 2, 5]))
        strides.insert(0, step)
        span = step * steps
    offset = unit * draw(st.sampled_from([0, 0, 1, 2, 3]))
    return rows(outer, strides, block, offset)


@st.composite
def messages(draw) -> list[Flow]:
    flows = []
    for tag in range(draw(st.integers(1, 5))):
        way = draw(st.sampled_from(["staging", "ll", "ll", "direct", "copy"]))
        sender = draw(st.integers(0, 2))
        receiver = sender if way == "copy" else (sender + draw(st.integers(1, 2))) % 3
        unit = draw(st.sampled_from([4, 8, 16] if way == "ll" else [1, 2, 4, 8, 16]))
        parts = []
        for _ in range(draw(st.integers(1, 3))):
            factors = draw(st.lists(st.sampled_from([2, 2, 3, 4, 5, 7, 8]), min_size=1, max_size=5))
            parts.append((draw(layouts(factors, unit)), draw(layouts(factors, unit))))
        if way == "ll" and any(widths(way, ends) < 4 for ends in parts):
            way = "staging"
        flows.append(Flow(sender, receiver, way, parts, tag))
    if all(flow.way == "copy" for flow in flows):
        flows.append(Flow(0, 1, "ll", [faces(8)], 9))
    return flows


@settings(max_examples=trials(96))
@given(st.data())
def test_any_messages_in_any_order(data):
    flows = data.draw(messages())
    with limited(
        data.draw(st.sampled_from([1, 1 << 17])),
        INLINE_CHUNKS=data.draw(st.sampled_from([0, 600])),
        SMALL_WORDS=data.draw(st.sampled_from([0, 1 << 16])),
    ):
        ranks = connect(
            flows,
            sms=data.draw(st.sampled_from([1, 3])),
            multiprocessors=data.draw(st.sampled_from([1, 2])),
        )
        exchange(
            ranks,
            4,
            first=data.draw(st.sampled_from([1, 2**16 - 2, 2**32 - 2])),
            order=[data.draw(st.sampled_from(ORDERS)) for _ in range(3)],
            delays=data.draw(st.sampled_from([0, 3])),
            seed=data.draw(st.integers(0, 99)),
        )


def test_the_shortest_word_of_a_message_decides_on_packets():
    """Packets carry words of four bytes or more; the path offers them by this number."""

    def word(*types):
        pairs = [Copy(*pair) for one in types for pair in paired(1 << 20, one, 1, 0)]
        return least_word(runs(pairs, packed=1))

    eight, four = dt.vector(9, 1, 2, "f8"), dt.vector(9, 1, 2, "f4")
    assert [word(eight), word(eight, four)] == [8, 4]
    assert word(eight, dt.hvector(5, 1, 101, dt.contiguous(77, "u1"))) == 1
