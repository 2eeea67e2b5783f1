"""Windows and keys of ``scatter_gather/mlx5_umr``, on a stand-in for adapters, against MPI's packing."""

from __future__ import annotations

import gc
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from halox import datatypes as dt
from halox.errors import PathError
from halox.paths.messages import Part
from halox.paths.scatter_gather.mlx5.keys import KeyPool, Memory
from halox.paths.scatter_gather.mlx5.windows import (
    ENTRIES,
    MOST_WINDOWS,
    Limits,
    MessageBlocks,
    Proposal,
    agreed_chunk,
    propose,
)
from tests import support
from tests.datatype_strategies import Recipe, build, recipes
from tests.fakes import fake_verbs
from tests.support import trials
from tests.unit.paths.mlx5_pair import Link, Pair, blocks_of, memory_of, message

support.require("mpi")
from tests import mpi_types as oracle  # noqa: E402

EXAMPLES = int(os.environ.get("HALOX_EXAMPLES", trials(240)))


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> fake_verbs.Wire:
    return fake_verbs.install(monkeypatch, (1, 2))


LIMITS = st.fixed_dictionaries(
    {
        "entries": st.sampled_from((1, 2, 4, 7, ENTRIES)),
        "repeats": st.sampled_from((1, 1, 3, 1000)),
        "key_bytes": st.sampled_from((5, 64, 1000, 1 << 30)),
        "pool": st.just(4),
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
)
def test_any_layout_to_any_other_as_mpi_packs_and_unpacks(
    recipe: Recipe, other: Recipe, count: int, limits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Datatypes and limits differ at both ends; bytes outside the target's blocks stay unchanged."""
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
    ends = [
        MessageBlocks.of(message(Part(0, source, counts[0]))),
        MessageBlocks.of(message(*parts)),
    ]
    places = {0: memory_of(received.bytes, received.origin), 1: memory_of(tail, 1)}
    fake_verbs.install(monkeypatch, (1, 2))
    pair = Pair(*limits)
    proposals = [propose(b, e.limits) for b, e in zip(ends, pair.engines, strict=True)]
    if agreed_chunk(*proposals, nbytes) is None:
        return
    memory = [memory_of(sent.bytes, sent.origin)], [places[n] for n in ends[1].arrays]
    Link(pair, ends, memory).move()
    np.testing.assert_array_equal(received.bytes, wanted.bytes)
    np.testing.assert_array_equal(tail[1 : 1 + rest], packed[nbytes - rest :])
    assert tail[0] == tail[-1] == 0x5A


# Windows


def test_identity_is_that_of_the_bytes_meant() -> None:
    face = dt.subarray((4, 6), (3, 2), (0, 0), "f8")
    assert blocks_of(face).identity == blocks_of(dt.vector(3, 2, 6, "f8")).identity
    assert blocks_of(face).identity != blocks_of(dt.vector(3, 2, 5, "f8")).identity
    other = MessageBlocks.of(message(Part(0, face), Part(1, face)))
    assert other.identity != blocks_of(face, face).identity


@pytest.mark.parametrize(
    ("sender", "receiver", "chunk"),
    [
        (dt.vector(64, 768, 1000, "u1"), dt.vector(96, 512, 1000, "u1"), 1536),
        (dt.vector(64, 768, 1000, "u1"), dt.contiguous(64 * 768, "u1"), 3072),
        # A common multiple of both block lengths exceeds four entries, so that blocks are cut.
        (dt.vector(7, 1001, 2000, "u1"), dt.vector(11, 637, 2000, "u1"), 2048),
        (dt.vector(64, 768, 1000, "u1"), dt.indexed([40000, 9152], [0, 50000], "u1"), 2048),
    ],
)
def test_agreed_windows_suit_both_ends(sender: Any, receiver: Any, chunk: int) -> None:
    limits = Limits(entries=4, repeats=1)
    ends = [blocks_of(sender), blocks_of(receiver)]
    proposals = [propose(end, limits) for end in ends]
    assert agreed_chunk(*proposals, ends[0].nbytes) == chunk
    assert agreed_chunk(*proposals[::-1], ends[0].nbytes) == chunk
    for end in ends:
        assert end.most_window_blocks(chunk) <= limits.entries


def test_sizes_that_cannot_agree_are_none() -> None:
    """A message of single bytes would need more windows than the limit."""
    n = 2 * MOST_WINDOWS
    scattered, limits = blocks_of(dt.vector(n, 1, 2, "u1")), Limits(entries=1, repeats=1)
    proposal = propose(scattered, limits)
    assert agreed_chunk(proposal, proposal, n) is None
    assert agreed_chunk(proposal, Proposal(1, n, n), n) is None
    assert agreed_chunk(*[propose(scattered, Limits(entries=2, repeats=1))] * 2, n) == 2


# Keys


class Faces:
    """Blocks of 64 bytes, 128 bytes apart, from one array to another."""

    def __init__(self, *limits: dict[str, int]) -> None:
        self.pair = Pair(*limits)
        self.blocks = blocks_of(dt.vector(16, 64, 128, "u1"))
        self.source, self.target = (np.zeros((16, 128), np.uint8) for _ in range(2))
        self.source[:] = np.arange(2048).reshape(16, 128) % 251

    def link(self, source: Any = None, target: Any = None) -> Link:
        """Link arrays, or memory, by default the own arrays."""
        ends = [
            self.source if source is None else source,
            self.target if target is None else target,
        ]
        memory = [[end if isinstance(end, Memory) else memory_of(end)] for end in ends]
        return Link(self.pair, (self.blocks, self.blocks), memory)

    def check(self, link: Link, source: np.ndarray, target: np.ndarray) -> None:
        target[:] = 0
        link.move()
        assert (target[:, :64] == source[:, :64]).all() and not target[:, 64:].any()


# Windows of four blocks.
FOUR = {"entries": 4, "repeats": 1}


def test_pool_makes_keys_in_batches_before_they_are_needed(wire: Any) -> None:
    (engine, _) = Pair({"pool": 8, "keys": 20}, {"pool": 1}).engines
    before = fake_verbs.Mlx5Mkey.made
    pool = KeyPool(engine)
    taken = pool.allocate(3) + pool.allocate(5)
    assert len(taken) == 8 and fake_verbs.Mlx5Mkey.made - before == 8
    assert len(pool.allocate(1)) == 1 and fake_verbs.Mlx5Mkey.made - before == 16
    assert len(pool.allocate(50)) == 11, "there are no more than 20"
    assert pool.allocate(1) == []
    pool.put_back(taken)
    assert len(pool.allocate(8)) == 8


def test_a_layout_is_mapped_and_sent_once(wire: Any) -> None:
    """Keys are new for other memory only."""
    faces = Faces(FOUR, FOUR)
    links = [faces.link() for _ in range(2)]
    for link in links:
        faces.check(link, faces.source, faces.target)
        link.release()
    for a, b in zip(links[0].lists, links[1].lists, strict=True):
        assert a is b and len(a.keys) == 4
    assert [exported.rkeys is None for exported in links[1].exports] == [True, True]
    other = np.zeros_like(faces.target)
    third = faces.link(target=other)
    faces.check(third, faces.source, other)
    assert third.lists[0] is links[0].lists[0] and third.lists[1] is not links[0].lists[1]


def test_freed_memory_is_noticed(wire: Any) -> None:
    """A new object at the address of a freed one is registered and mapped again, and the peer gets new keys."""
    faces, target = Faces(FOUR, FOUR), np.zeros((16, 128), np.uint8)

    class Owner:
        pass

    lists = []
    for _ in range(2):
        owner = Owner()
        link = faces.link(target=memory_of(target)._replace(owner=owner))
        faces.check(link, faces.source, target)
        link.release()
        lists.append(link.lists[1])
        del owner
        gc.collect()
    assert lists[0] is not lists[1] and lists[0].registrations != lists[1].registrations


def test_keys_in_use_survive_that_their_memory_is_registered_anew(wire: Any) -> None:
    faces = Faces(FOUR, FOUR)
    keys, memory = faces.pair.keys[0], memory_of(faces.source)
    first = keys.acquire(faces.blocks, 256, [memory])
    used = [*first.keys]
    again = keys.acquire(faces.blocks, 256, [memory._replace(owner=faces)])
    assert first.keys == used and not set(map(id, again.keys)) & set(map(id, used))
    keys.release(first)
    assert first.keys == [] and again.keys
    keys.release(again)
    assert again.keys, "they stay mapped"


def test_unused_lists_give_way(wire: Any) -> None:
    """The least recently used list without a plan loses its keys, and the peer removes them from its cache."""
    faces = Faces(FOUR | {"keys": 8, "pool": 4}, FOUR)
    first, second, third = (faces.source + step for step in (0, 1, 2))
    links = []
    for array in (first, second):
        links.append(faces.link(array))
        links[-1].release()
    link = faces.link(third)
    assert not links[0].lists[0].keys and links[1].lists[0].keys
    assert len(faces.pair.keys[1]._remote) == 2, "the first one's keys are forgotten"
    faces.check(link, third, faces.target)
    held = faces.link(second)
    assert held.lists[0] is links[1].lists[0]
    with pytest.raises(PathError):
        faces.link(first)


def test_keys_that_a_peer_does_not_know_are_refused(wire: Any) -> None:
    faces = Faces(FOUR, FOUR)
    keys, peer = faces.pair.keys
    exported = keys.export(keys.acquire(faces.blocks, 256, [memory_of(faces.source)]), 1)
    with pytest.raises(PathError):
        peer.accept(0, exported._replace(rkeys=None))
    peer.accept(0, exported)
    assert peer.accept(0, exported._replace(rkeys=None)) == exported.rkeys
    with pytest.raises(PathError):
        peer.accept(0, exported._replace(rkeys=None, number=99))
