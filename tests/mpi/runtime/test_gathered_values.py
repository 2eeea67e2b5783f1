"""Numbers of all ranks, gathered in one step that also detects differences between ranks; the next gather is right."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

from halox.errors import HaloxError, MismatchError
from halox.runtime.gathered_values import MOST_BYTES, GatheredValues
from halox.runtime.world import World

pytestmark = pytest.mark.ranks(1, 2, 3)
DOING = "an allreduce"


@pytest.fixture(params=["one node", "a node each"])
def world(
    request: pytest.FixtureRequest, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    if request.param == "a node each":
        monkeypatch.setenv("HALOX_NODE", "rank")
    made = World(comm, "a call")
    yield made
    made.close()


def gathered(world: World, meaning: object, elements: int = 3) -> list[list[float]] | None:
    dtype = np.dtype("f8")
    values = GatheredValues(world, meaning, dtype, (elements,))
    mine = np.arange(elements) + 10.0 * world.rank
    found = values.gather(mine, DOING)
    if found is None:
        return None
    assert not elements or all(one.ctypes.data % 64 == 0 for one in found.each)
    assert found.stacked.tolist() == [one.tolist() for one in found.each]
    return found.stacked.tolist()


@pytest.mark.parametrize("elements", [0, 1, 3, 29, 30, 31, MOST_BYTES // 8])
def test_every_length(elements: int, world: World) -> None:
    wanted = [(np.arange(elements) + 10.0 * rank).tolist() for rank in range(world.size)]
    for _ in range(5):
        assert gathered(world, "the same", elements) == wanted


def test_meanings_that_differ(world: World) -> None:
    """All ranks detect different meanings, also with different lengths."""
    if world.size > 1:
        for _ in range(2):
            is_last = world.rank == world.size - 1
            assert gathered(world, ("sum", is_last), 440 if is_last else 1) is None
    assert gathered(world, "the same") is not None


@pytest.mark.parametrize("length", [10, 300, 9000])
def test_an_error_of_one_rank(length: int, world: World) -> None:
    """All ranks raise the error in the same gather, however long its text is."""
    with pytest.raises(HaloxError, match="x" * length):
        if world.rank == world.size - 1:
            world.agree(HaloxError("x" * length), DOING)
        else:
            gathered(world, "the same")
    assert gathered(world, "the same") is not None


@pytest.mark.parametrize("others", [None, "a record", ["x" * 9000]])
def test_an_object_of_one_rank(others: object, world: World) -> None:
    """Ranks do not confuse an object with numbers: all raise."""
    if world.size > 1:
        text = "in an allreduce rank.* gave an array or a number of the host, and other ranks"
        with pytest.raises(MismatchError, match=text):
            if world.rank == world.size - 1:
                world.gather(others, DOING)
            else:
                gathered(world, "the same")
    assert gathered(world, "the same") is not None


def test_another_call_of_one_rank(world: World) -> None:
    if world.size > 1:
        world.begin("sum" if world.rank else "allreduce")
        with pytest.raises(MismatchError):
            gathered(world, "the same")
    world.begin("sum")
    assert gathered(world, "the same") is not None
