"""Host packing by MPI: the same bytes as with MPI's own nested types and with NumPy, and the rule when to use it."""

from __future__ import annotations

import gc
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halox.datatypes import (
    contiguous,
    hindexed,
    indexed,
    indexed_block,
    resized,
    struct,
    subarray,
    vector,
)
from halox.packing import host_choice, host_mpi
from halox.packing.host import HostPacker
from halox.packing.host_choice import HostLayout, listed_pays, regular_pays
from halox.packing.host_mpi import MpiType, Speeds, by_mpi
from halox.packing.pack import pack, unpack
from tests import support
from tests.support import trials
from tests.unit.datatype_strategies import Recipe, build, recipes

support.require("mpi")
from mpi4py import MPI  # noqa: E402

from tests.unit.test_pack_against_mpi import compare_packing, mpi_packs_rightly  # noqa: E402

FAST = Speeds(regular=1.0, listed=3.0, element=3.0, word=0.8)
SLOW = Speeds(regular=9.0, listed=30.0, element=2.5, word=0.8)

TRIPLES = vector(7600, 1, 2, contiguous(3, "f4"))


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[HostLayout]:
    """Make MPI pack every layout that it can, from the first use; the list records these layouts."""
    found: list[HostLayout] = []

    def pays(self: HostLayout, mpi: object) -> bool:
        found.append(self)
        form = self.strided
        return form is None or (bool(form.counts) and min(form.strides) > 0)

    monkeypatch.setattr(HostLayout, "_pays", pays)
    monkeypatch.setattr(host_choice, "_MANY_USES", -1)
    monkeypatch.setattr(host_choice, "_is_odd", lambda form: True)
    return found


def test_random_types_as_mpi_packs_them_nested(used: list[HostLayout]) -> None:
    moved = []

    @settings(max_examples=trials(600), deadline=None, suppress_health_check=list(HealthCheck))
    @given(recipe=recipes(), count=st.sampled_from((1, 2, 3)))
    def check(recipe: Recipe, count: int) -> None:
        ours = build(recipe)
        if not mpi_packs_rightly(ours):
            return
        compare_packing(recipe, count)
        made = host_choice.host_layout(ours, count)
        if made._mpi_type() is None:
            return
        moved.append(made.strided is not None)
        # Packed bytes at an odd address, between guard bytes.
        memory = np.random.default_rng(0).integers(0, 256, made.span, np.uint8)
        numpy, mpi = made.by_numpy(memory), made.copier(memory, lasting=True)
        if mpi.func is not by_mpi:
            return
        wanted = np.empty(ours.size * count, np.uint8)
        numpy(wanted, False)()
        around = np.full(wanted.size + 3, 0xA5, np.uint8)
        mpi(around[1:-2], False)()
        assert around[1:-2].tobytes() == wanted.tobytes()
        assert (around[[0, -2, -1]] == 0xA5).all()
        if not ours.overlaps(count):
            before = ~memory
            memory[:] = before
            numpy(wanted, True)()
            after = memory.copy()
            memory[:] = before
            mpi(around[1:-2], True)()
            assert memory.tobytes() == after.tobytes()

    check()
    assert 0 < sum(moved) < len(moved), "some of both kinds were MPI's"


@pytest.mark.parametrize("shift", [0, 1])
def test_arrays_at_any_address(used: list[HostLayout], shift: int) -> None:
    """NumPy packs arrays with misaligned words."""
    memory = np.arange(200, dtype=np.uint8)[shift:]
    made = hindexed([12, 4, 8], [0, 20, 40], "u1")
    packer = HostPacker(memory, made)
    copier = packer._layout.copier(packer._memory, lasting=True)
    assert (copier.func is by_mpi) == (shift == 0)
    out = np.zeros(24, np.uint8)
    packer.packing(out)()
    assert out.tolist() == [
        b + shift for a, n in ((0, 12), (20, 4), (40, 8)) for b in range(a, a + n)
    ]


def test_layouts_are_told_apart() -> None:
    rng = np.random.default_rng(3)
    regular = {
        "triples of floats": (TRIPLES, True),
        "five doubles a point": (vector(102, 1, 104, contiguous(5, "f8")), True),
        "doubles": (vector(7600, 1, 2, "f8"), False),
        "complex": (vector(7600, 1, 2, "c16"), False),
        "long rows": (vector(64, 128, 256, "f8"), False),
        "one run": (contiguous(7600, "f8"), False),
        "few blocks": (vector(7, 3, 6, "f4"), False),
        "backwards": (vector(700, 3, -6, "f4"), False),
        "transposed": (
            contiguous(512, resized(vector(512, 3, 3 * 512, "f4"), 0, 12)),
            False,
        ),
    }
    for name, (made, wanted) in regular.items():
        assert made.strided is not None
        assert regular_pays(made.strided, FAST) == wanted, name
        assert not regular_pays(made.strided, SLOW), name
    boxes = [
        subarray((16, 19), (16, 3), (0, 2), "f4"),
        subarray((16, 65, 19), (16, 65, 3), (0, 0, 2), "f4"),
    ]
    columns = np.arange(1024)
    lists = {
        "boxes of two sizes": (struct([1, 1], [0, 4096], boxes), True),
        "long runs of different lengths": (indexed(1024 - columns, columns * 1025, "f8"), True),
        "single doubles": (indexed_block(1, rng.permutation(4000)[:3000], "f8"), False),
        "rows of 23 floats": (indexed_block(23, 30 * rng.permutation(900), "f4"), True),
        "few": (indexed_block(3, 3 * rng.permutation(90), "f4"), False),
    }
    for name, (made, wanted) in lists.items():
        assert made.strided is None
        blocks = made.blocks()
        word = HostLayout(made, 1).word
        assert listed_pays(blocks, word, FAST) == wanted, name
    assert not listed_pays(lists["boxes of two sizes"][0].blocks(), 4, SLOW)


def test_what_is_chosen_is_used_and_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_mpi, "speeds", lambda mpi: FAST)
    made = vector(7600, 1, 2, contiguous(3, "f4"))
    array = np.arange(6 * 7600, dtype="f4")
    out = np.zeros(made.size, np.uint8)
    call = HostPacker(array, made).packing(out)
    call()
    wanted = array.reshape(-1, 6)[:, :3]
    assert (out.view("f4").reshape(-1, 3) == wanted).all()
    (kept,) = made.kept.values()
    first = kept._type
    assert first is not None
    target = np.zeros_like(array)
    for _ in range(12):  # the public functions create a packer in each call
        unpack(pack(array, made), made, target)
    assert (target.reshape(-1, 6)[:, :3] == wanted).all() and not target.reshape(-1, 6)[:, 3:].any()
    assert kept._type is first, "one MPI datatype"


def test_mpi_datatypes_are_freed_with_their_layouts(used: list[HostLayout]) -> None:
    gc.collect()
    before = len(host_mpi._living)
    made = indexed_block(3, [0, 7, 4, 20], "f4")
    out = np.zeros(made.size, np.uint8)
    HostPacker(np.zeros(40, "f4"), made).packing(out)()
    (kept,) = used
    handle = kept._type.handle if kept._type is not None else MPI.DATATYPE_NULL
    assert handle != MPI.DATATYPE_NULL and len(host_mpi._living) == before + 1
    del made, kept
    used.clear()
    gc.collect()
    assert len(host_mpi._living) == before and handle == MPI.DATATYPE_NULL


def test_an_mpi_that_packs_other_bytes_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = host_mpi.speeds.__wrapped__
    found = measure(MPI)
    assert found is not None and min(found) > 0

    class Wrong(MpiType):
        def __init__(self, mpi: object, layout: object, word: int, span: int) -> None:
            other = vector(512, 3, 5, "f4").layout  # another stride
            super().__init__(mpi, other, word, span)  # type: ignore[arg-type]

    monkeypatch.setattr(host_mpi, "MpiType", Wrong)
    assert measure(MPI) is None


AFTER_THE_END = """
import numpy as np
from mpi4py import MPI
from halox.datatypes import contiguous, indexed, vector
from halox.packing import host_choice, host_mpi
from halox.packing.host import HostPacker
from halox.packing.host_mpi import Speeds, by_mpi
host_mpi.speeds = lambda mpi: Speeds(1.0, 3.0, 3.0, 0.8)
array = np.arange(6000.0)
kinds, calls = [], []
for made in (vector(600, 3, 6, "f8"), indexed(np.arange(1, 80), np.arange(79) * 70, "f8")):
    packer = HostPacker(array, made)
    out = np.zeros(packer.nbytes, np.uint8)
    kinds.append(packer._layout.copier(packer._memory, lasting=True).func)
    calls.append((packer.packing(out), out, packer))
assert kinds == [by_mpi, by_mpi], kinds
for call, out, _ in calls:
    call()
wanted = [out.tobytes() for _, out, _ in calls]
MPI.Finalize()
for (call, out, packer), bytes_ in zip(calls, wanted, strict=True):
    out[:] = 0
    call()
    assert out.tobytes() == bytes_
    out[:] = 0
    packer.packing(out)()
    assert out.tobytes() == bytes_
print("right after the end")
"""

WITHOUT = """
import sys
import numpy as np
from halox.datatypes import vector
from halox.packing.pack import pack
array = np.arange(6000.0)
for _ in range(20):
    packed = pack(array, made := vector(600, 3, 6, "f8"))
assert (packed.view("f8").reshape(-1, 3) == array[:3600].reshape(-1, 6)[:, :3]).all()
assert "mpi4py.MPI" not in sys.modules
import mpi4py
mpi4py.rc.thread_level = "serialized"
from mpi4py import MPI
from halox.packing.host_mpi import usable_mpi
assert (usable_mpi() is None) == (MPI.Query_thread() != MPI.THREAD_MULTIPLE)
print("right without")
"""


@pytest.mark.parametrize(
    ("code", "said"), [(AFTER_THE_END, "right after the end"), (WITHOUT, "right without")]
)
def test_without_mpi_numpy_packs(code: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr
