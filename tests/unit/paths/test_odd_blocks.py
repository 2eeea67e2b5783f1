"""Messages of odd blocks by MPI: the same bytes as by NumPy, the choice of MPI, and the life of its datatypes."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from halox.paths.host import odd_blocks
from halox.paths.host.odd_blocks import OddBlocks, PartView, call_all
from halox.paths.host.packed import views_of
from tests import support

support.require("mpi")
from mpi4py import MPI  # noqa: E402

GUARD = 16


@pytest.fixture(autouse=True)
def any_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let any MPI library copy odd blocks, also one that is slower than NumPy."""
    monkeypatch.setattr(odd_blocks, "usable_mpi", lambda: MPI)


def place(shape: tuple[int, ...], size: int, strides: tuple[int, ...], start: int = 0) -> PartView:
    return 0, shape, np.dtype(f"V{size}"), start, strides


TRIPLES = place((4000,), 12, (24,))
NUMPYS: dict[str, PartView] = {
    "doubles": (0, (4000,), np.dtype("u8"), 0, (24,)),
    "pairs of doubles": place((4000,), 16, (24,)),
    "long blocks": place((4000,), 96, (120,)),
    "few blocks": place((63,), 12, (24,)),
    "backwards": place((4000,), 12, (-24,), 4000 * 24),
    "a transposed matrix": place((512, 512), 12, (12, 512 * 12)),
}


def test_short_blocks_of_an_odd_size_are_for_mpi() -> None:
    assert OddBlocks([TRIPLES])
    assert OddBlocks([NUMPYS["doubles"], TRIPLES])
    for name, one in NUMPYS.items():
        assert not OddBlocks([one]), name


@pytest.mark.parametrize("shift", [0, 1, 4])
@pytest.mark.parametrize(
    ("shape", "size", "strides"),
    [
        ((40,), 12, (24,)),
        ((5, 9), 12, (1200, 36)),
        ((5, 9), 24, (40, 400)),
        ((3, 4, 5), 20, (3000, 400, 60)),
        ((17,), 3, (5,)),
        ((9,), 95, (101,)),
    ],
)
def test_blocks_are_copied_as_by_numpy(
    shape: tuple[int, ...],
    size: int,
    strides: tuple[int, ...],
    shift: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A part of MPI's and a part of NumPy's, between guard bytes, in memory at any address."""
    monkeypatch.setattr(odd_blocks, "_FEW_BLOCKS", 8)
    memory = np.random.default_rng(0).integers(1, 256, 10000, np.uint8)
    words: PartView = (0, (20,), np.dtype("u8"), 8 + shift, (48,))
    places = [place(shape, size, strides, 16 + shift), words]
    memories = [memory.data]
    odd, views = OddBlocks(places), views_of(places, memories)
    assert odd
    whole = [np.full(view.nbytes + GUARD, 0xA5, np.uint8) for view in views]
    packed = [
        np.ndarray(view.shape, view.dtype, buffer)
        for view, buffer in zip(views, whole, strict=True)
    ]
    calls = odd.calls(views, packed, memories, unpack=False)
    # MPI's datatypes of aligned words only fit aligned memory.
    word = odd_blocks._word(places[0])
    assert (calls[0].func.__name__ == "Pack") == (views[0].ctypes.data % word == 0)  # type: ignore[attr-defined]
    call_all(calls)
    for view, buffer in zip(views, whole, strict=True):
        assert buffer[:-GUARD].tobytes() == view.tobytes()
        assert (buffer[-GUARD:] == 0xA5).all()
    wanted = memory.copy()
    for index, view in enumerate(views_of(places, [wanted.data])):
        whole[index][:-GUARD] ^= 0xFF
        view[...] = packed[index]
    assert (wanted != memory).any()
    call_all(odd.calls(views, packed, memories, unpack=True))
    np.testing.assert_array_equal(memory, wanted)


def test_datatypes_are_freed_with_the_messages() -> None:
    odd = OddBlocks([TRIPLES])
    (made,) = odd._types
    assert made is not None and made != MPI.DATATYPE_NULL
    del odd
    gc.collect()
    assert made == MPI.DATATYPE_NULL


CODE = """
import sys
from halox.paths.host.odd_blocks import usable_mpi
assert usable_mpi() is None and "mpi4py.MPI" not in sys.modules
import mpi4py
mpi4py.rc.thread_level = sys.argv[1]
from mpi4py import MPI
is_fast = MPI.get_vendor()[0] == "Open MPI" and MPI.Query_thread() == MPI.THREAD_MULTIPLE
assert (usable_mpi() is MPI) == is_fast
MPI.Finalize()
assert usable_mpi() is None
print("right")
"""


@pytest.mark.parametrize("level", ["multiple", "serialized"])
def test_mpi_is_used_if_any_thread_may_call_it(level: str) -> None:
    command: list[Any] = [sys.executable, "-c", CODE, level]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "right" in done.stdout, done.stdout + done.stderr
