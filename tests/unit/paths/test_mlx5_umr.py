"""The engine for mlx5 adapters, on a stand-in for pyverbs: layouts against MPI, limits and failures."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from halox import datatypes as dt
from halox.errors import ExchangeTimeoutError, MissingPackageError, PathError
from halox.paths.messages import Part
from halox.paths.scatter_gather.mlx5.windows import ENTRIES, MessageBlocks, agreed_chunk, propose
from halox.runtime import mlx5
from halox.runtime.gpu.dmabuf import flush_writes
from halox.runtime.waiting import Waiter
from tests import support
from tests.datatype_strategies import Recipe, build, recipes
from tests.fakes import fake_verbs
from tests.fakes.fake_driver import fake_driver
from tests.support import trials
from tests.unit.paths.mlx5_pair import Link, Pair, blocks_of, memory_of, message

support.require("mpi")
from tests import mpi_types as oracle  # noqa: E402


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> fake_verbs.Wire:
    return fake_verbs.install(monkeypatch, (1, 2))


def link(types: Any, arrays: Any, pair: Pair | None = None) -> Link:
    """Link the memory of a sender and of a receiver."""
    memory = [[memory_of(array.bytes, array.origin)] for array in arrays]
    return Link(pair or Pair(), [blocks_of(t) for t in types], memory)


VECTOR = dt.vector(96, 512, 1024, "u1")


def by_mpi(types: Any, sent: oracle.Memory, received: oracle.Memory) -> np.ndarray:
    """Return the expected memory of the receiver: MPI packs and unpacks."""
    wanted = oracle.Memory(types[1], 1)
    wanted.bytes[:] = received.bytes
    made = [t.to_mpi() for t in types]
    singles = [oracle.one_item(one, 1) for one in made]
    packed = oracle.mpi_pack(singles[0], sent, types[0].size)
    oracle.mpi_unpack(packed, singles[1], wanted)
    for handle in (*made, *singles):
        handle.Free()
    return wanted.bytes


def filled(types: Any) -> tuple[oracle.Memory, oracle.Memory, np.ndarray]:
    """Return the sender's and the receiver's memory, and the expected memory of the receiver."""
    sent, received = (oracle.Memory(t, 1) for t in types)
    sent.bytes[:] = np.arange(sent.bytes.size) * 37 % 251
    received.bytes[:] = 0xFF
    wanted = by_mpi(types, sent, received)
    assert (wanted != received.bytes).any()
    return sent, received, wanted


LIMITS = st.fixed_dictionaries(
    {
        "entries": st.sampled_from((1, 2, 4, 7, ENTRIES)),
        "repeats": st.sampled_from((1, 1, 3, 1000)),
        "key_bytes": st.sampled_from((5, 64, 1000, 1 << 30)),
        "pool": st.just(4),
    }
)


@settings(
    max_examples=trials(240),
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
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


def test_memory_of_a_new_owner_is_registered_anew(wire: Any) -> None:
    """An object at the address of a freed one: the old registration may refer to pages that are gone."""
    (sent, received, wanted), pair, lists = filled((VECTOR, VECTOR)), Pair(), []
    ends = [blocks_of(VECTOR)] * 2
    for owner in (sent, received):
        memory = memory_of(received.bytes, received.origin)._replace(owner=owner)
        found = Link(pair, ends, [[memory_of(sent.bytes, sent.origin)], [memory]])
        received.bytes[:] = 0xFF
        found.move()
        np.testing.assert_array_equal(received.bytes, wanted)
        found.release()
        lists.append(found.lists)
    assert lists[0][0] is lists[1][0]
    assert lists[0][1].registrations != lists[1][1].registrations


def test_a_failed_write_names_the_peer(wire: Any) -> None:
    """The receiver's memory is no longer registered; later transfers fail, too."""
    sent, received, _ = filled((VECTOR, VECTOR))
    ends = link((VECTOR, VECTOR), (sent, received))
    ends.lists[1].registrations[0].mr.close()
    for _ in range(2):
        with pytest.raises(PathError):
            ends.move()


def test_a_peer_that_takes_nothing_is_named(wire: fake_verbs.Wire) -> None:
    sent, received, _ = filled((VECTOR, VECTOR))
    ends = link((VECTOR, VECTOR), (sent, received))
    wire.is_held = True
    for engine in ends.pair.engines:
        engine._waiter = lambda: Waiter(0.2, crowded=True)
    with pytest.raises(ExchangeTimeoutError):
        ends.move()


def test_numbers_wait_for_receives(wire: Any) -> None:
    """More numbers than a receive queue holds arrive once and in order; the sender waits while its queue is full."""
    sender, receiver = Pair().engines
    found = []
    for number in range(mlx5.RECEIVE_DEPTH + 100):
        sender.notify(1, number)
    for _ in range(3):
        found += receiver.arrivals()
    sender.complete()
    assert found == [(0, number) for number in range(mlx5.RECEIVE_DEPTH + 100)]


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[Any]:
    """Use a file as the memory of a GPU; yields the stand-in driver and the memory."""
    support.require("nvrtc")  # the bindings belong to the same package
    path = tmp_path / "gpu"
    path.write_bytes(bytes(range(256)) * (16 * mmap.PAGESIZE // 256))
    with path.open("r+b") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), 0), "u1")
    with fake_driver() as found:
        found.files.append((memory.ctypes.data, memory.nbytes, str(path)))
        yield found, memory
    fake_verbs.REFUSED.clear()


@pytest.mark.parametrize("offset", [0, 1, 4095, 9000])
@pytest.mark.parametrize("way", ["from", "to"])
def test_gpu_memory_by_dmabuf(way: str, offset: int, wire: Any, gpu: Any) -> None:
    """Arrays may start anywhere in a page; the export starts at the page, and keys count addresses from there."""
    kind = dt.vector(24, 300, 500, "u1")
    there = gpu[1][offset:][:12000]
    here = (np.arange(there.size) * 37 % 251).astype("u1")
    ends = [(there, 0), (here, None)] if way == "from" else [(here, None), (there, 0)]
    before = ends[1][0].copy()
    around = gpu[1].copy()
    pair = Pair().engines
    blocks = blocks_of(kind)
    keys, regions = [], []
    for engine, (array, device) in zip(pair, ends, strict=True):
        at = array.ctypes.data
        regions.append(engine.register(at, array.nbytes, device))
        keys.append(engine.make_key())
        engine.map(keys[-1], blocks.windows(kind.size, [at], [regions[-1]])[0])
    assert not fake_verbs.DMABUFS, "the descriptor has been registered"
    pair[0].write(1, keys[1].rkey, 1, keys[0])
    pair[0].complete()
    inside = np.arange(there.size) % 500 < 300
    inside[kind.extent :] = False
    assert (ends[1][0] == np.where(inside, ends[0][0], before)).all()
    assert (before[inside] != ends[0][0][inside]).any()
    assert (gpu[1][:offset] == around[:offset]).all()
    assert (gpu[1][offset + 12000 :] == around[offset + 12000 :]).all()


@pytest.mark.parametrize("refusing", ["driver", "pages", "adapter"])
def test_gpu_memory_that_cannot_be_registered(refusing: str, wire: Any, gpu: Any) -> None:
    """The error names the driver or the adapter as the cause, and no descriptor stays open."""
    driver, memory = gpu
    at, said = memory.ctypes.data, "cannot be exported as a dmabuf: .*NOT_SUPPORTED"
    if refusing == "driver":
        driver.has_dmabufs = False
    elif refusing == "pages":
        at, said = at + memory.nbytes - 100, "exported as a dmabuf: .*INVALID_VALUE.*by the grid"
    else:
        fake_verbs.REFUSED.append("all")
        said = "refuses to register 1000 bytes of GPU 0 by dmabuf"
    engine, _ = Pair().engines
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PathError, match=said):
        engine.register(at, 1000, 0)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("is_ordered", [True, False])
def test_writes_of_adapters_are_flushed(is_ordered: bool, gpu: Any) -> None:
    """A flush is needed only if the GPU does not order the adapter's writes."""
    gpu[0].is_ordered = is_ordered
    for _ in range(2):
        flush_writes(0)
    assert gpu[0].flushes == (0 if is_ordered else 2)


def test_an_adapter_without_keys_left_says_so(wire: fake_verbs.Wire) -> None:
    wire.most_keys = 3
    with pytest.raises(PathError):
        Pair()


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    with pytest.raises(MissingPackageError):
        mlx5.open_adapter()
    fake_verbs.install(monkeypatch, ())
    with pytest.raises(PathError):
        mlx5.open_adapter()
    fake_verbs.install(monkeypatch, (1,))
    monkeypatch.setattr(fake_verbs._Port, "state", 1)
    with pytest.raises(PathError):
        mlx5.open_adapter()
