"""The host packer: memory, errors, additions and its ways of copying; the suite and MPI compare the bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from halox.datatypes import (
    Datatype,
    as_datatype,
    contiguous,
    hindexed,
    indexed,
    indexed_block,
    resized,
    slab,
    struct,
    vector,
)
from halox.errors import DatatypeError, FieldError, HaloxError
from halox.packing.host import HostPacker
from halox.packing.pack import pack, unpack
from tests.packers import displacements
from tests.support import require

GUARD = 16


def filled(shape: Any, dtype: str = "f8") -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


BLOCKS = [1, 2, 3, 4, 8, 12, 24, 144, 1032, 5000]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("misaligned", [0, 1, 4])
@pytest.mark.parametrize("regular", [True, False])
def test_every_block_length_and_alignment(block: int, misaligned: int, regular: bool) -> None:
    memory = np.random.default_rng(block).integers(0, 256, 20 * block + 64, np.uint8)
    starts = [0, 3, 6, 9] if regular else [0, 3, 11, 7]
    starts = [start * block + 1 * (block > 8) * (block % 2) for start in starts]
    made = hindexed([block] * 4, starts, "u1")
    assert (made.strided is not None) == regular
    array = memory[misaligned:]
    packer = HostPacker(array, made)
    out = np.full(packer.nbytes + GUARD, 0xA5, np.uint8)
    packer.pack(out)
    expected = np.concatenate([array[start : start + block] for start in starts])
    np.testing.assert_array_equal(out[: packer.nbytes], expected)
    assert (out[packer.nbytes :] == 0xA5).all()

    target = np.zeros_like(memory)
    HostPacker(target[misaligned:], made).unpack(out)
    wanted = np.zeros_like(memory)
    for number, start in enumerate(starts):
        wanted[misaligned:][start : start + block] = out[number * block :][:block]
    np.testing.assert_array_equal(target, wanted)
    assert target.any()


@pytest.mark.parametrize("dtype", ["?", "f2", "f8", "c16", "g", "M8[s]", "S5"])
def test_box_of_an_array_of_any_strides(dtype: str) -> None:
    array = np.zeros((6, 7, 8), dtype)
    array.view(np.uint8)[...] = np.random.default_rng(0).integers(0, 2, array.view("u1").shape)
    for view in (array, array[::-1, :, ::2], array.transpose(2, 0, 1), array[2:, 3:4, ::-1]):
        starts = [n // 4 for n in view.shape]
        subsizes = [max(1, n - n // 2) for n in view.shape]
        box = view[tuple(slice(a, a + n) for a, n in zip(starts, subsizes, strict=True))]
        made = slab(view.shape, view.strides, starts, subsizes, view.dtype)
        packed = np.zeros(box.nbytes, np.uint8)
        HostPacker(view, made).pack(packed)
        assert packed.tobytes() == box.tobytes()


def test_views_with_gaps_are_refused() -> None:
    """Consecutive items are consecutive in memory, and not along a view; the axes may have any order."""
    whole = filled((4, 6, 5))
    packed = np.zeros(whole.nbytes, np.uint8)
    for view in (whole[:, 1], whole[..., ::2], whole[::-1], whole[1:, 1:], whole[0].T[1:]):
        with pytest.raises(FieldError):
            pack(view, "f8", 2)
        with pytest.raises(FieldError):
            unpack(packed, "f8", view, 2)
    assert np.array_equal(whole, filled(whole.shape))
    for view in (whole, whole.transpose(1, 0, 2), whole[1:3], whole[:, :0], whole[1:2, 1:3]):
        assert pack(view, "f8", view.size).view("f8").tolist() == np.sort(view.flat).tolist()


def test_structured_arrays_leave_their_padding_alone() -> None:
    dtype = np.dtype([("a", "i1"), ("b", "f8"), ("c", "i2")], align=True)
    array = np.zeros(5, dtype)
    array.view("u1")[:] = 0xEE
    array["a"], array["b"], array["c"] = np.arange(5), np.arange(5) / 3, -np.arange(5)
    packed = pack(array, dtype, count=5)
    assert packed.size == 55
    target = np.zeros(5, dtype)
    target.view("u1")[:] = 0x11
    unpack(packed, dtype, target, count=5)
    for field in "abc":
        np.testing.assert_array_equal(target[field], array[field])
    padding = [*range(1, 8), *range(18, 24)]
    assert (target.view("u1").reshape(5, 24)[:, padding] == 0x11).all()


def test_displacements_may_leave_the_view_but_not_its_memory() -> None:
    inner = np.frombuffer(bytearray(filled(20)), "f8")[5:15]
    around = indexed_block(1, [-5, 14], "f8")
    assert pack(inner, around).view("f8").tolist() == [0, 19]
    for beyond in (-6, 15):
        with pytest.raises(FieldError):
            pack(inner, indexed_block(1, [0, beyond], "f8"))
    with pytest.raises(FieldError):
        pack(inner, contiguous(6, "f8"), count=3)
    pack(inner, indexed_block(0, [10**9], "f8"))  # empty blocks may lie outside


def test_packer_keeps_the_array_alive() -> None:
    packer = HostPacker(filled(1000), vector(10, 1, 7, "f8"))
    junk = [np.full(1000, -1.0) for _ in range(20)]
    out = np.empty(packer.nbytes, np.uint8)
    packer.pack(out)
    assert out.view("f8").tolist() == list(range(0, 70, 7))
    del junk


def added(memory: np.ndarray, made: Datatype, count: int, values: np.ndarray) -> np.ndarray:
    """Add element by element, in the order of the definitions."""
    result = memory.copy()
    places = displacements(made, count).reshape(values.size, values.itemsize)
    for place, value in zip(places, values, strict=True):
        with np.errstate(over="ignore"):
            element = result[place].view(values.dtype) + value
        result[place] = element.astype(values.dtype).view(np.uint8)
    return result


@pytest.mark.parametrize(
    "buffer",
    [
        np.zeros(64, np.int8),
        np.zeros((8, 8), np.uint8),
        bytearray(64),
        np.zeros(23, np.uint8),
        np.zeros(64, np.uint8)[::2],
    ],
    ids=["int8", "two axes", "no array", "short", "gaps"],
)
def test_unfit_buffers(buffer: Any) -> None:
    packer = HostPacker(filled(9), vector(3, 1, 3, "f8"))
    for call in (packer.pack, packer.unpack):
        with pytest.raises(FieldError):
            call(buffer)


def test_read_only_memory() -> None:
    frozen = filled(9)
    frozen.setflags(write=False)
    packer = HostPacker(frozen, vector(3, 1, 3, "f8"))
    out = np.zeros(24, np.uint8)
    packer.pack(out)
    assert out.view("f8").tolist() == [0, 3, 6]
    for call in (packer.unpack, packer.unpacking):
        with pytest.raises(FieldError):
            call(out)
    out.setflags(write=False)
    with pytest.raises(FieldError):
        packer.pack(out)


def test_pack_into_a_given_buffer_returns_its_part() -> None:
    buffer = np.full(40, 0xA5, np.uint8)
    packed = pack(filled(9), vector(3, 1, 3, "f8"), out=buffer)
    assert np.shares_memory(packed, buffer)
    assert packed.view("f8").tolist() == [0, 3, 6]
    assert (buffer[24:] == 0xA5).all()
    assert pack(filled(9), contiguous(0, "f8")).size == 0
    assert pack(filled(9), as_datatype("f8"), count=0).size == 0


def test_types_that_touch_a_byte_twice_are_packed_but_not_unpacked() -> None:
    twice = indexed_block(2, [0, 1], "f8")
    assert pack(filled(9), twice).view("f8").tolist() == [0, 1, 1, 2]
    target = filled(9)
    with pytest.raises(DatatypeError):
        unpack(np.zeros(32, np.uint8), twice, target)
    with pytest.raises(DatatypeError):
        unpack(np.zeros(32, np.uint8), resized(contiguous(2, "f8"), 0, 8), target, count=2)
    assert target.tolist() == filled(9).tolist()


@pytest.mark.parametrize("misaligned", [0, 1])
@pytest.mark.parametrize("order", ["C", "F"])
def test_boxes_of_several_fields_are_copied_box_by_box(order: Any, misaligned: int) -> None:
    """A struct of boxes is copied in its order; bytes around the boxes stay as they are."""
    shapes = ((30, 20, 10), (20, 10), (8, 30, 20))
    memory = np.random.default_rng(1).integers(1, 256, 60000, np.uint8)[misaligned:]
    fields, types, starts, at = [], [], [], 16
    for shape in shapes:
        field = np.ndarray(shape, "f4", memory, at, order=order)
        box = tuple(slice(1, n - 2) for n in shape)
        sizes = tuple(n - 3 for n in shape)
        types.append(slab(shape, field.strides, (1,) * len(shape), sizes, "f4"))
        fields.append(field[box])
        starts.append(at)
        at += field.nbytes
    made = struct([1] * len(types), starts, types)
    assert made.strided is None
    packer = HostPacker(memory, made)
    out = np.full(packer.nbytes + GUARD, 0xA5, np.uint8)
    call = packer.packing(out)
    call()
    assert out[:-GUARD].tobytes() == b"".join(field.tobytes() for field in fields)
    assert (out[-GUARD:] == 0xA5).all()
    before = memory.copy()
    for field in fields:
        field[...] = 0
    cleared = memory.copy()
    HostPacker(memory, made).unpack(out)
    np.testing.assert_array_equal(memory, before)
    assert (cleared != before).any()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("form", ["triangle", "short odd blocks"])
def test_many_blocks_in_repeated_calls(form: str, count: int) -> None:
    """Repeated calls, which MPI may make, move the bytes of the first call; other arrays are packed, too."""
    require("mpi")
    if form == "triangle":
        n = 90
        where = np.tri(n, dtype=bool)
        made = indexed(range(1, n + 1), range(0, n * n, n), "f8")
        made = resized(made, 0, n * n * 8)
    else:
        where = np.zeros((80, 9), bool)
        where[:, :3] = True
        made = resized(vector(80, 3, 9, "f8"), 0, where.size * 8)
    for seed in (1, 2):
        array = np.random.default_rng(seed).random((count, *where.shape))
        wanted = array[:, where].tobytes()
        packer = HostPacker(array, made, count)
        out = np.zeros(packer.nbytes, np.uint8)
        call = packer.packing(out)
        moves: list[Callable[[], object]] = [*[partial(packer.pack, out)] * 6, call, call]
        for move in moves:
            out[...] = 0
            move()
            assert out.tobytes() == wanted
        back = np.full_like(array, -1)
        other = HostPacker(back, made, count)
        for move in (partial(other.unpack, out), other.unpacking(out)):
            back[...] = -1
            move()
            np.testing.assert_array_equal(back, np.where(where, array, -1))


@pytest.mark.parametrize("misaligned", [0, 1])
@pytest.mark.parametrize(("block", "step"), [(23, 30), (20, 20), (40, 7)])
def test_equal_blocks_at_any_places_are_indexed_block_by_block(
    block: int, step: int, misaligned: int
) -> None:
    order = np.random.default_rng(2).permutation(60)[:50]
    made = indexed_block(block, step * order, "f4")
    memory = np.random.default_rng(1).integers(1, 256, 8000, np.uint8)[misaligned:]
    packer = HostPacker(memory, made)
    wanted = b"".join(memory[4 * step * n :][: 4 * block].tobytes() for n in order)
    out = np.full(packer.nbytes + GUARD, 0xA5, np.uint8)
    call = packer.packing(out)
    call()
    assert out[:-GUARD].tobytes() == wanted
    assert (out[-GUARD:] == 0xA5).all()
    target = np.zeros_like(memory)
    HostPacker(target, made).unpacking(out)()
    expected = np.zeros_like(memory)
    for number, n in enumerate(order):
        expected[4 * step * n :][: 4 * block] = out[4 * block * number :][: 4 * block]
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize(
    "made",
    [contiguous(1, "f8"), vector(8, 1, 8, "f8"), indexed([1, 2, 1], [0, 4, 9], "f8")],
    ids=["one number", "a column", "a list"],
)
def test_calls_with_a_known_datatype_check_their_arguments(made: Datatype) -> None:
    """Calls with any arrays share the plan of the datatype."""
    for dtype in ("f8", "u1", "c16", "i4"):
        memory = filled(4000 // np.dtype(dtype).itemsize, dtype)
        for source in (memory, memory.view("u1")[8:], memory.view("u1")[1:]):
            packed = pack(source, made)
            blocks, whole = made.blocks(), source.view("u1").tobytes()
            wanted = [whole[o : o + n] for o, n in zip(blocks.offsets, blocks.lengths, strict=True)]
            assert packed.tobytes() == b"".join(wanted)
            target = np.zeros_like(memory).view("u1")
            unpack(packed, made, target)
            assert pack(target, made).tobytes() == packed.tobytes()
    fixed = np.zeros(500)
    fixed.flags.writeable = False
    for wrong in (
        lambda: pack(np.zeros(1, "u1"), made),
        lambda: pack(np.zeros(500), made, out=np.empty(made.size - 1, "u1")),
        lambda: pack(np.zeros(500), made, out=fixed.view("u1")),
        lambda: unpack(packed, made, fixed),
        lambda: pack(np.zeros((5000, 2), "u1")[:, 1], made),
        lambda: pack(np.zeros(500), made, 1.0),  # type: ignore[arg-type]
        lambda: pack(np.zeros(500), made, -1),
        lambda: pack(np.zeros(500), made, method="workunits"),
    ):
        with pytest.raises(HaloxError):
            wrong()
    assert pack(np.zeros(500), made, np.int64(1)).size == made.size  # type: ignore[arg-type]


def test_methods_are_for_the_memory_they_fit() -> None:
    assert pack(filled(3), "f8", method="host").view("f8").tolist() == [0]
    for method in ("strided", "nonsense"):
        with pytest.raises(DatatypeError):
            pack(filled(3), "f8", method=method)
        with pytest.raises(DatatypeError):
            unpack(np.zeros(8, np.uint8), "f8", filled(3), method=method)
