"""Windows, keys and rounds of the scatter_gather path, with an engine in host memory, against MPI's packing."""

from __future__ import annotations

import gc
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from halox import datatypes as dt
from halox.errors import PathError
from halox.paths.messages import Message, Part
from halox.paths.scatter_gather.copy_engine import CopyEngine
from halox.paths.scatter_gather.engine import Limits, RegisteredRegion
from halox.paths.scatter_gather.keys import KeyPool, Keys, Memory, Rounds
from halox.paths.scatter_gather.process_vm import ProcessVm
from halox.paths.scatter_gather.windows import (
    MOST_WINDOWS,
    MessageBlocks,
    Proposal,
    agreed_chunk,
    propose,
)
from halox.runtime.place import Place
from tests import support
from tests.datatype_strategies import Recipe, build, recipes
from tests.fakes.memory_engine import Fabric, MemoryEngine
from tests.support import trials

support.require("mpi")
from tests import mpi_types as oracle  # noqa: E402

EXAMPLES = int(os.environ.get("HALOX_EXAMPLES", trials(400)))


def message(*parts: Part, direction: Any = "send", peer: int = 1) -> Message:
    return Message(peer, direction, parts)


def blocks_of(*types: dt.Datatype) -> MessageBlocks:
    return MessageBlocks.of(message(*(Part(0, t) for t in types)))


def memory_of(array: np.ndarray, origin: int = 0) -> Memory:
    return Memory(array.ctypes.data + origin, array.ctypes.data, array.nbytes, array)


class Pair:
    """Two ranks, each with its own engine, and a message from rank 0 to rank 1."""

    def __init__(self, sender: dict[str, int], receiver: dict[str, int]) -> None:
        fabric = Fabric()
        self.engines = MemoryEngine(0, fabric, **sender), MemoryEngine(1, fabric, **receiver)
        self.keys = [Keys(engine) for engine in self.engines]

    def link(
        self, ends: tuple[MessageBlocks, MessageBlocks], memory: tuple[list[Memory], list[Memory]]
    ) -> tuple[Rounds, Rounds]:
        nbytes = ends[0].nbytes
        proposals = [propose(b, e.limits) for b, e in zip(ends, self.engines, strict=True)]
        chunk = agreed_chunk(*proposals, nbytes)
        assert chunk is not None and chunk > 0
        lists = [k.acquire(b, chunk, m) for k, b, m in zip(self.keys, ends, memory, strict=True)]
        exports = [
            k.export(own, 1 - n) for n, (k, own) in enumerate(zip(self.keys, lists, strict=True))
        ]
        a, b = (
            Rounds(
                self.keys[n],
                lists[n],
                1 - n,
                exports[1 - n],
                self.keys[n].accept(1 - n, exports[1 - n]),
            )
            for n in (0, 1)
        )
        assert (a.count, a.at_once, a.n_windows) == (b.count, b.at_once, b.n_windows)
        return a, b

    def release(self, ends: tuple[Rounds, Rounds]) -> None:
        for keys, end in zip(self.keys, ends, strict=True):
            keys.release(end._own)

    @staticmethod
    def move(ends: tuple[Rounds, Rounds], direction: Any) -> None:
        mover = ends[0] if direction == "put" else ends[1]
        for number in range(mover.count):
            for end in ends:
                end.enter(number)
            for transfer in mover.transfers(direction, number):
                transfer()


LIMITS = st.fixed_dictionaries(
    {
        "entries": st.sampled_from((1, 2, 4, 7, 100)),
        "repeats": st.sampled_from((1, 1, 3, 1000)),
        "key_bytes": st.sampled_from((5, 64, 1000, 1 << 30)),
        "keys": st.sampled_from((1, 3, 1 << 16)),
        "windows": st.sampled_from((1, 2, 8)),
        "window_bytes": st.sampled_from((1, 32)),
    }
)


@settings(
    max_examples=EXAMPLES, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck)
)
@given(
    recipe=recipes(),
    other=recipes(),
    count=st.sampled_from((1, 2, 3)),
    limits=st.tuples(LIMITS, LIMITS),
    direction=st.sampled_from(("put", "get")),
)
def test_any_layout_to_any_other_as_mpi_packs_and_unpacks(
    recipe: Recipe, other: Recipe, count: int, limits: Any, direction: str
) -> None:
    """Datatypes and engine limits differ at both ends; bytes outside the target's blocks stay unchanged."""
    source, into = build(recipe), build(other)
    assume(source.size and into.size and oracle.mpi_packs_rightly(source))
    # Equal bytes at both ends: whole items at the source; at the target, whole items and then single bytes.
    counts = [max(1, into.size * count // source.size), 0]
    nbytes = counts[0] * source.size
    counts[1], rest = divmod(nbytes, into.size)
    assume(counts[0] <= 8 and counts[1] <= 8 and not into.overlaps(max(counts[1], 1)))
    sent, received = oracle.Memory(source, counts[0]), oracle.Memory(into, counts[1])
    tail = np.full(rest + 2, 0x5A, np.uint8)
    sent.bytes[:] = np.arange(sent.bytes.size) * 37 % 251
    received.bytes[:] = 0x5A
    wanted = oracle.Memory(into, counts[1])
    wanted.bytes[:] = 0x5A
    made = [oracle.mpi_type(r, halves=oracle.OPEN_MPI) for r in (recipe, other)]
    singles = [oracle.one_item(t, n) for t, n in zip(made, counts, strict=True)]
    packed = oracle.mpi_pack(singles[0], sent, nbytes)
    assume(counts[1] == 0 or oracle.mpi_packs_rightly(into))
    oracle.mpi_unpack(packed[: nbytes - rest], singles[1], wanted)
    for handle in (*made, *singles):
        handle.Free()

    parts = [Part(0, into, counts[1])] * bool(counts[1])
    parts += [Part(1, dt.contiguous(rest, "u1"))] * bool(rest)
    ends = (
        MessageBlocks.of(message(Part(0, source, counts[0]))),
        MessageBlocks.of(message(*parts, direction="receive", peer=0)),
    )
    places = {0: memory_of(received.bytes, received.origin), 1: memory_of(tail, 1)}
    pair = Pair(*limits)
    event(direction)
    if not all(_is_possible(b, e.limits) for b, e in zip(ends, pair.engines, strict=True)):
        return
    linked = pair.link(
        ends, ([memory_of(sent.bytes, sent.origin)], [places[n] for n in ends[1].arrays])
    )
    pair.move(linked, direction)
    np.testing.assert_array_equal(received.bytes, wanted.bytes)
    np.testing.assert_array_equal(tail[1 : 1 + rest], packed[nbytes - rest :])
    assert tail[0] == tail[-1] == 0x5A


def _is_possible(blocks: MessageBlocks, limits: Limits) -> bool:
    return propose(blocks, limits).by_bytes > 0


def test_blocks_of_several_arrays_are_merged_within_each() -> None:
    joined = message(
        Part(4, dt.contiguous(3, "f8")),
        Part(4, dt.hindexed([1], [24], "f8")),
        Part(2, dt.hindexed([1], [32], "f8")),
        Part(4, dt.vector(2, 1, 2, "f4")),
    )
    blocks = MessageBlocks.of(joined)
    assert blocks.arrays == (4, 2)
    assert blocks.array_of.tolist() == [0, 1, 0, 0]
    assert blocks.offsets.tolist() == [0, 32, 0, 8] and blocks.lengths.tolist() == [32, 8, 4, 4]


def test_identity_is_that_of_the_bytes_meant() -> None:
    face = dt.subarray((4, 6), (3, 2), (0, 0), "f8")
    assert blocks_of(face).identity == blocks_of(dt.vector(3, 2, 6, "f8")).identity
    assert blocks_of(face).identity != blocks_of(dt.vector(3, 2, 5, "f8")).identity
    other = MessageBlocks.of(message(Part(0, face), Part(1, face)))
    assert other.identity != MessageBlocks.of(message(Part(0, face), Part(0, face))).identity


@pytest.mark.parametrize(
    ("sender", "receiver", "chunk"),
    [
        (dt.vector(64, 768, 1000, "u1"), dt.vector(96, 512, 1000, "u1"), 1536),
        (dt.vector(64, 768, 1000, "u1"), dt.contiguous(64 * 768, "u1"), 3072),
        (dt.contiguous(1 << 16, "u1"), dt.contiguous(1 << 16, "u1"), 1 << 16),
        (dt.vector(12, 1000, 2000, "u1"), dt.vector(16, 750, 2000, "u1"), 3000),
        # A common multiple of both block lengths exceeds four entries, so that blocks are cut.
        (dt.vector(7, 1001, 2000, "u1"), dt.vector(11, 637, 2000, "u1"), 2048),
        (dt.vector(64, 768, 1000, "u1"), dt.indexed([40000, 9152], [0, 50000], "u1"), 2048),
    ],
)
def test_agreed_windows_suit_both_ends(sender: Any, receiver: Any, chunk: int) -> None:
    limits = Limits(entries=4)
    ends = [blocks_of(sender), blocks_of(receiver)]
    assert ends[0].nbytes == ends[1].nbytes
    proposals = [propose(end, limits) for end in ends]
    assert agreed_chunk(*proposals, ends[0].nbytes) == chunk
    assert agreed_chunk(*proposals[::-1], ends[0].nbytes) == chunk
    for end in ends:
        assert end.most_window_blocks(chunk) <= limits.entries


def test_regular_blocks_take_one_entry_where_it_repeats() -> None:
    face, limits = dt.vector(1000, 100, 300, "u1"), Limits(entries=2, repeats=1 << 20)
    assert propose(blocks_of(face), limits).by_blocks == 100_000
    irregular = dt.indexed_block(100, [0, 300, 700], "u1")
    assert propose(blocks_of(irregular), limits).by_blocks == 200


def test_messages_are_divided_for_both_ends_to_work() -> None:
    whole = blocks_of(dt.contiguous(1 << 20, "u1"))
    assert propose(whole, Limits(1, windows=8)).by_blocks == 1 << 17
    assert propose(whole, Limits(1, windows=8, window_bytes=1 << 19)).by_blocks == 1 << 19
    assert propose(whole, Limits(1, key_bytes=1000)).by_bytes == 512


def test_sizes_that_cannot_agree_are_none() -> None:
    """A message of single bytes would need more windows than the limit."""
    n = 2 * MOST_WINDOWS
    scattered, limits = blocks_of(dt.vector(n, 1, 2, "u1")), Limits(entries=1)
    proposal = propose(scattered, limits)
    assert agreed_chunk(proposal, proposal, n) is None
    assert agreed_chunk(proposal, Proposal(1, n, n), n) is None
    assert agreed_chunk(*[propose(scattered, Limits(entries=2))] * 2, n) == 2


# Keys


def face_pair(n: int = 16, block: int = 64) -> tuple[MessageBlocks, list[np.ndarray]]:
    blocks = blocks_of(dt.vector(n, block, 2 * block, "u1"))
    arrays = [np.zeros(2 * n * block, np.uint8) for _ in range(2)]
    arrays[0][:] = np.arange(arrays[0].size) % 251
    return blocks, arrays


def test_pool_makes_keys_in_batches_before_they_are_needed() -> None:
    engine = MemoryEngine(pool=8, keys=20)
    pool = KeyPool(engine)
    assert (pool.free, engine.made) == (8, 8)
    taken = pool.allocate(3)
    pool.refill()
    assert (pool.free, engine.made) == (5, 8)
    taken += pool.allocate(1)
    pool.refill()
    assert (pool.free, engine.made) == (12, 16)
    assert len(pool.allocate(50)) == 16, "there are no more than 20"
    assert pool.allocate(1) == []
    pool.put_back(taken)
    assert pool.free == 4
    pool.close()


def test_a_layout_is_mapped_and_sent_once() -> None:
    pair, (blocks, arrays) = Pair({}, {}), face_pair()
    memory = tuple([memory_of(a)] for a in arrays)
    for repeat in range(3):
        linked = pair.link((blocks, blocks), memory)
        pair.move(linked, "put")
        assert (arrays[1].reshape(16, 128)[:, :64] == arrays[0].reshape(16, 128)[:, :64]).all()
        assert [e.mapped for e in pair.engines] == [4, 4], repeat
        assert [e.exported for e in pair.engines] == [4, 4], repeat
        pair.release(linked)
    # Other memory, another chunk, another layout: new keys.
    other = np.zeros_like(arrays[1])
    pair.move(pair.link((blocks, blocks), (memory[0], [memory_of(other)])), "get")
    assert (other.reshape(16, 128)[:, :64] == arrays[0].reshape(16, 128)[:, :64]).all()
    assert [e.mapped for e in pair.engines] == [4, 8]


def test_freed_memory_is_noticed() -> None:
    """A new object at the address of a freed one is registered and mapped again, and the peer gets new keys."""
    pair, (blocks, arrays) = Pair({}, {}), face_pair()
    ground = np.zeros(arrays[1].size, np.uint8)

    class Owner:
        pass

    def memory(owner: object) -> list[Memory]:
        return [Memory(ground.ctypes.data, ground.ctypes.data, ground.nbytes, owner)]

    generations = []
    for _ in range(2):
        owner = Owner()
        linked = pair.link((blocks, blocks), ([memory_of(arrays[0])], memory(owner)))
        ground[:] = 0
        pair.move(linked, "put")
        assert (ground.reshape(16, 128)[:, :64] == arrays[0].reshape(16, 128)[:, :64]).all()
        (region,) = pair.engines[1].regions.values()
        generations.append(region.generation)
        pair.release(linked)
        del owner
        gc.collect()
    assert generations[0] != generations[1]
    assert [e.mapped for e in pair.engines] == [4, 8]


def test_segments_of_a_gpu_that_are_freed_are_noticed() -> None:
    """Memory at the same address in a new segment: the peer gets new keys, since keys name the segment."""
    segment = ["first", 0]

    class Arena:
        device = 0

        def locate(self, start: int, end: int) -> Any:
            return Place((segment[0], segment[1]), start - 4096)

    arena: Any = Arena()
    own, theirs = Keys(CopyEngine(arena)), Keys(CopyEngine(arena))
    blocks = blocks_of(dt.vector(8, 100, 200, "u1"))
    memory = [Memory(8192, 8192, 1600, None)]
    exports = []
    for name in ("first", "first", "second"):
        segment[0] = name
        found = own.acquire(blocks, 1 << 20, memory)
        exports.append(own.export(found, 1))
        (remote,) = theirs.accept(0, exports[-1])
        assert [place.segment for place in remote.blocks[0]] == [(name, 0)]
        own.release(found)
    assert [exported.keys is None for exported in exports] == [False, True, False]


def test_keys_in_use_survive_that_their_memory_is_registered_anew() -> None:
    pair, (blocks, arrays) = Pair({}, {}), face_pair()
    keys = pair.keys[0]
    first = keys.acquire(blocks, 256, [memory_of(arrays[0])])
    used = [*first.keys]
    again = keys.acquire(
        blocks, 256, [Memory(arrays[0].ctypes.data, arrays[0].ctypes.data, arrays[0].nbytes, pair)]
    )
    assert first.keys == used and not set(map(id, again.keys)) & set(map(id, used))
    keys.release(first)
    assert first.keys == [] and again.keys
    keys.release(again)
    assert again.keys, "they stay mapped"


def test_windows_slide_where_keys_are_few() -> None:
    """Three keys at the sender, two at the receiver and sixteen windows need eight rounds."""
    pair, (blocks, arrays) = Pair({"entries": 1, "keys": 3}, {"entries": 1, "keys": 2}), face_pair()
    linked = pair.link((blocks, blocks), tuple([memory_of(a)] for a in arrays))
    assert (linked[0].n_windows, linked[0].at_once, linked[0].count) == (16, 2, 8)
    for step in range(2):
        arrays[0][:] = (np.arange(arrays[0].size) + step) % 251
        pair.move(linked, "put" if step else "get")
        assert (arrays[1].reshape(16, 128)[:, :64] == arrays[0].reshape(16, 128)[:, :64]).all()


def test_unused_lists_give_way() -> None:
    """The least recently used list without a plan loses its keys, and the peer removes them from its cache."""
    pair, (blocks, arrays) = Pair({"keys": 8}, {}), face_pair()
    first, second, third = (np.copy(arrays[0]) for _ in range(3))
    target = [memory_of(arrays[1])]
    for array in (first, second):
        pair.release(pair.link((blocks, blocks), ([memory_of(array)], target)))
    assert pair.engines[0].mapped == 8
    linked = pair.link((blocks, blocks), ([memory_of(third)], target))
    assert len(pair.keys[1]._remote) == 2, "the first one's keys are forgotten"
    third[:] = 7
    pair.move(linked, "get")
    assert (arrays[1].reshape(16, 128)[:, :64] == 7).all()
    held = pair.keys[0].acquire(blocks, 256, [memory_of(second)])
    assert pair.engines[0].mapped == 12, "the second one's are mapped still"
    with pytest.raises(PathError):
        pair.keys[0].acquire(blocks, 256, [memory_of(first)])
    pair.keys[0].release(held)


def test_keys_that_a_peer_does_not_know_are_refused() -> None:
    pair, (blocks, arrays) = Pair({}, {}), face_pair()
    keys = pair.keys[0]
    exported = keys.export(keys.acquire(blocks, 256, [memory_of(arrays[0])]), 1)
    with pytest.raises(PathError):
        pair.keys[1].accept(0, exported._replace(keys=None))
    pair.keys[1].accept(0, exported)
    assert pair.keys[1].accept(0, exported._replace(keys=None)) == exported.keys
    with pytest.raises(PathError, match="generation"):
        pair.keys[1].accept(0, exported._replace(keys=None, generation=99))


def test_exports_may_be_taken_in_another_order() -> None:
    """A list is dropped and mapped again. The new list may arrive before the order to drop the old one."""
    pair, (blocks, arrays) = Pair({}, {}), face_pair()
    keys, peer, memory = *pair.keys, [memory_of(arrays[0])]
    former = keys.acquire(blocks, 256, memory)
    peer.accept(0, keys.export(former, 1))
    keys.release(former)
    keys.drop(former)
    other = keys.export(keys.acquire(blocks, 128, memory), 1)
    again = keys.acquire(blocks, 256, memory)
    exported = keys.export(again, 1)
    assert other.dropped and exported.keys is not None and exported.generation != former.generation
    for one in (exported, other):
        peer.accept(0, one)
    assert peer.accept(0, keys.export(again, 1)) == exported.keys


@pytest.mark.parametrize("count", [1, 2, 3, 5, 59, 118, 700, 1024])
@pytest.mark.parametrize("is_regular", [True, False], ids=["alike", "uneven"])
def test_windows_can_be_shared_out_between_both_ends(count: int, is_regular: bool) -> None:
    """The first half of the windows has 40 to 60 percent of the bytes, so that both ends can copy half a message."""
    lengths = np.full(count, 16384) + (0 if is_regular else np.arange(count) % 7 * 1000)
    starts = np.cumsum(lengths + 4096) - lengths
    blocks = MessageBlocks((0,), np.zeros(count, np.int64), starts, lengths)
    own = propose(blocks, ProcessVm.limits)
    chunk = agreed_chunk(own, own, blocks.nbytes)
    assert chunk is not None
    windows = blocks.windows(chunk, [RegisteredRegion(0, 0, 0)], [0])
    first = sum(window.nbytes for window in windows[: len(windows) // 2])
    few = count in (3, 5) and is_regular  # windows of whole blocks halve few blocks less evenly
    assert (0.3 if few else 0.4) <= first / blocks.nbytes <= 0.6
    assert len(windows) <= (3 if is_regular else 16)
