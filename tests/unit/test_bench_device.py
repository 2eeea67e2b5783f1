"""The benchmarks of packing on a GPU, their logic and their kernels, without one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halox.cli import main
from halox.errors import DeviceError
from halox.runtime.gpu import cuda
from halox.runtime.gpu.compiler import OPTIONS, preamble
from halox_bench.common import byhand, kernels, neighbour, reference
from halox_bench.common.layouts import Box, Boxes
from halox_bench.common.options import KIB
from halox_bench.common.rig import Rig
from halox_bench.common.rows import Row
from halox_bench.pack import baselines, contention, on_device, synthetic
from halox_bench.pack.cases import select
from halox_bench.pack.on_device import DeviceBench
from halox_bench.pack.options import PackOptions
from halox_bench.pack.patterns import Case
from halox_bench.pack.placed import Placed
from halox_bench.pack.rows import COPY
from tests.support import require
from tests.unit import bench_gpu
from tests.unit.nvrtc import by_nvrtc

require("cxx")

CASES = [
    *("vector_512/8B-64KiB", "hypercube/4", "lower_triangle/1024", "random_indexed/dense-64KiB"),
    *("struct_24/4096", "WRF_y_sa/2x2", "MILC_su3_zdown/8x8x8x8", "SPECFEM3D_cm/c1", "FFT2/256"),
    *("face_x/64", "upper_triangle/1024", "LAMMPS_full/1907-1662"),
]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    bench_gpu.install(monkeypatch)
    monkeypatch.setattr(on_device._OneDirection, "_public_host_us", lambda self: 3.5)
    monkeypatch.setattr(synthetic, "HYPERCUBE", 16)
    return Rig(repeats=3)


def rows_of(rig: Rig, names: list[str], **options: Any) -> list[Row]:
    bench = DeviceBench(PackOptions(**options), rig)
    return [row for case in select(names) for row in bench.measure(case)]


class TestByHandKernels:
    """The hand-written baselines, run as C++ beside NumPy's slicing."""

    # The structs' kernel needs shared memory: a GPU checks it, before it is timed.
    @pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("struct")])
    @pytest.mark.parametrize("direction", ["pack", "unpack"])
    def test_moves_what_slicing_moves(self, rig: Rig, name: str, direction: str) -> None:
        (case,) = select([name])
        slab = rig.cp.empty(case.slab_bytes, np.uint8)
        slab[:] = reference.filled(case.slab_bytes)
        arrays = [
            slab[at : at + n].view(np.ndarray)
            for at, n in zip(case.offsets, case.arrays, strict=True)
        ]
        wanted = np.empty(case.payload, np.uint8)
        case.by_hand.pack(arrays, wanted)
        move = byhand.prepare(case.by_hand, case.offsets, direction, 0)
        # Guard bytes around the packed bytes.
        packed = rig.cp.empty(case.payload + 64, np.uint8)
        packed[:] = 0xA5
        if direction == "unpack":
            packed[32:-32] = wanted
            slab[:] = ~slab
        move(slab.data.ptr, packed.data.ptr + 32, 0)
        assert (packed[:32] == 0xA5).all() and (packed[-32:] == 0xA5).all()
        if direction == "pack":
            assert np.array_equal(packed[32:-32], wanted)
            return
        assert np.count_nonzero(slab == reference.filled(slab.size)) == case.payload
        found = np.empty(case.payload, np.uint8)
        case.by_hand.pack(arrays, found)
        assert np.array_equal(found, wanted)

    def test_a_wrong_table_is_noticed(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(byhand, "THREADS", 64)  # differs from the table
        (case,) = select(["face_x/64"])
        layout = Boxes((Box(8, (64, 64), (34848, 520), case.by_hand.boxes[0].offset),))
        changed = Case(
            case.pattern, case.size, case.arrays, case.build, case.payload, by_hand=layout
        )
        rows = DeviceBench(PackOptions(methods=("strided",)), rig).measure(changed)
        failed = {row.name for row in rows if row.failed}
        assert failed >= {baselines.BY_HAND}, rows


class TestCopies:
    def test_levels(self) -> None:
        assert byhand.copies_3d(Box(64)) == [(0, 0, Box(64))]
        assert byhand.copies_3d(Box(8, (3,), (4,))) is None
        (plain,) = byhand.copies_3d(Box(8, (4, 3), (96, 32), 16))
        assert plain == (16, 0, Box(8, (4, 3), (96, 32)))
        # Planes that are no multiple of rows, or lie inside one another, go one by one.
        for plane in (100, 32):
            parts = byhand.copies_3d(Box(8, (4, 3), (plane, 64)))
            assert [(at, packed) for at, packed, _ in parts] == [
                (i * plane, 24 * i) for i in range(4)
            ]

    @pytest.mark.parametrize("name", ["hypercube/4", "face_x/64", "FFT2/256", "vector/8B-64KiB"])
    @pytest.mark.parametrize("direction", ["pack", "unpack"])
    def test_cuda_copies_give_the_same(self, rig: Rig, name: str, direction: str) -> None:
        rows = rows_of(rig, [name], methods=("strided",), directions=(direction,))
        names = {row.name for row in rows if row.kind == "baseline" and not row.error}
        wanted = (
            baselines.MEMCPY_3D if name in ("hypercube/4", "face_x/64") else baselines.MEMCPY_2D
        )
        assert wanted in names, rows


class TestRun:
    @pytest.mark.parametrize("name", CASES)
    def test_every_kind_of_case(self, rig: Rig, name: str) -> None:
        directions = ("pack",) if name.startswith("struct") else ("pack", "unpack")
        rows = rows_of(rig, [name], directions=directions, methods=("auto", "workunits"))
        assert not [row for row in rows if row.failed], [row.error for row in rows if row.failed]
        assert {row.destination for row in rows} == {"device", "host", "peer"}
        assert {row.direction for row in rows} == set(directions)
        timed = [row for row in rows if not row.error]
        assert all(row.us > 0 and row.gb_per_s > 0 and row.of_bound > 0 for row in timed)
        assert all(row.of_copy == 1 for row in timed if row.name == COPY)
        public = [row for row in timed if row.name == "auto" and row.destination == "device"]
        assert all(row.host_us == 3.5 and row.note == "strided" for row in public)

    def test_caches(self, rig: Rig) -> None:
        rows = rows_of(rig, ["face_x/64"], destinations=("device",), methods=("strided",))
        assert {row.cache for row in rows} == {"warm", "cold"}
        assert {row.sector_bytes for row in rows} == {64 * 64 * 32}
        rows = rows_of(rig, ["vector/8B-1MiB"], destinations=("device",), methods=("strided",))
        assert {row.cache for row in rows} == {"large"}

    def test_cold_turns_go_over_separate_memory(self, rig: Rig) -> None:
        (case,) = select(["face_x/64"])
        placed = Placed(rig, case)
        touched = placed.sector_bytes + case.payload
        assert placed.turns * touched >= 4 * rig.l2_bytes
        steps = np.diff(placed.slabs)
        assert (steps >= case.slab_bytes).all() and np.array_equal(steps, np.diff(placed.addresses))
        for turn in (0, placed.turns - 1):
            start = placed.slabs[turn] - placed.slabs[0]
            memory = placed.memory[start : start + case.slab_bytes]
            assert np.array_equal(memory, reference.filled(case.slab_bytes))

    def test_unsupported_types_are_not_failures(self, rig: Rig) -> None:
        rows = rows_of(rig, ["lower_triangle/1024"], methods=("copy_engine", "strided"))
        refused = [row for row in rows if row.name == "copy_engine"]
        assert refused and all("blocks differ" in row.error and not row.failed for row in refused)

    @pytest.mark.parametrize("direction", ["pack", "unpack"])
    def test_wrong_bytes_are_a_failure(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch, direction: str
    ) -> None:
        class Wrong(bench_gpu.Packer):
            def pack(self, array: int, packed: int, stream: int) -> None:
                super().pack(array, packed, stream)
                bench_gpu.memory_at(packed + self.nbytes - 1, 1)[:] ^= 1

            def unpack(self, packed: int, array: int, stream: int) -> None:
                super().unpack(packed, array, stream)
                bench_gpu.memory_at(array, 1)[:] ^= 1

        monkeypatch.setattr(on_device, "make_packer", lambda *given, **_: Wrong(*given[:3]))
        rows = rows_of(rig, ["face_y/64"], methods=("strided",), directions=(direction,))
        ours = [row for row in rows if row.kind == "packer"]
        assert ours and all(row.failed and "wrong result" in row.error for row in ours)
        assert not any(row.failed for row in rows if row.kind == "baseline")

    def test_an_exception_is_a_row(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(method: str, *given: Any, **named: Any) -> Any:
            if method == "traversal":
                raise RuntimeError("no such kernel")
            return bench_gpu.make_packer(method, *given, **named)

        monkeypatch.setattr(on_device, "make_packer", broken)
        rows = rows_of(rig, ["face_y/64"], methods=("traversal", "strided"))
        assert {row.name for row in rows if row.failed} == {"traversal"}
        assert all(row.us for row in rows if row.name == "strided")

    def test_a_broken_device_ends_the_run(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        broken = []

        def fail(*_: Any, **__: Any) -> Any:
            broken.append(True)
            raise RuntimeError("illegal address")

        def synchronize(device: Any) -> None:
            if broken:
                raise RuntimeError("illegal address, still")

        monkeypatch.setattr(on_device, "make_packer", fail)
        monkeypatch.setattr(bench_gpu.Device, "synchronize", synchronize)
        with pytest.raises(on_device.BrokenDeviceError, match=r"strided on face_y/64 .*illegal"):
            rows_of(rig, ["face_y/64"], methods=("strided",))

    def test_too_large_for_the_device(self, rig: Rig) -> None:
        (row,) = rows_of(rig, ["vector_512/8B-64MiB"])
        assert "left out" in row.error and not row.failed

    def test_many_blocks_are_extrapolated(self, rig: Rig) -> None:
        rows = rows_of(rig, ["vector/8B-64KiB"], methods=("strided",))
        (row, *_) = [row for row in rows if row.name == baselines.BLOCK_COPIES]
        assert row.note == "extrapolated from 256 of 8192 blocks"


class Ticks:
    """A clock that goes on when it is looked at, so that no machine is too busy to be in time."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        self._now += 1e-5
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


@pytest.fixture
def contended(monkeypatch: pytest.MonkeyPatch, rig: Rig) -> Callable[[], list[Row]]:
    monkeypatch.setattr(contention, "CASES", ((8, 64 * KIB), (128, 64 * KIB)))
    monkeypatch.setattr(neighbour, "_COPY_BYTES", 1 << 16)
    monkeypatch.setattr(neighbour, "PATIENCE_S", 20e-5)
    ticks = Ticks()
    for module in (contention, neighbour):
        monkeypatch.setattr(module, "time", ticks)

    def run() -> list[Row]:
        (case,) = contention.cases(argparse.Namespace(quick=True))
        return contention.ContentionBench(rig).measure(case)

    return run


class TestContention:
    def test_all_neighbours(
        self, contended: Callable[[], list[Row]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert {row.note for row in contended()} == {"the neighbour had ended before"}
        monkeypatch.setattr(bench_gpu.Stream, "done", False)  # neighbours that stay
        rows = contended()
        assert len({row.neighbour for row in rows}) == 7
        assert {row.destination for row in rows} == {"device", "host"}
        assert all(row.slowdown == row.us / row.alone_us - 1 for row in rows)
        assert not any(row.note for row in rows)

    def test_starving(
        self, contended: Callable[[], list[Row]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Nothing ends while the kernel holds anything.
        held = []

        def hold(launch: bench_gpu.Launch, stream: int) -> None:
            if launch._function[1] == "hold":
                held[:] = [launch.args[3].value]
            original(launch, stream)

        original = bench_gpu.Launch.launch
        monkeypatch.setattr(bench_gpu.Launch, "launch", hold)
        monkeypatch.setattr(bench_gpu.Event, "done", property(lambda self: not (held and held[0])))
        starved = [row for row in contended() if row.us is None]
        assert starved and all("starved" in row.error or "alone" in row.error for row in starved)

    def test_a_packer_that_refuses_is_a_row(
        self, contended: Callable[[], list[Row]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(method: str, *given: Any, **named: Any) -> Any:
            if method == "copy_engine":
                raise DeviceError("no such engine")
            return bench_gpu.make_packer(method, *given, **named)

        monkeypatch.setattr(contention, "make_packer", refuse)
        rows = contended()
        refused = [row for row in rows if row.name == "copy_engine"]
        assert refused and all("no such engine" in row.error for row in refused)
        assert any(row.us for row in rows if row.name == "strided")


def test_the_command(
    contended: Callable[[], list[Row]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cuda, "cupy", lambda: bench_gpu.fake_cupy(1 << 20))
    monkeypatch.setattr(cuda, "why_no_gpu", lambda: None)
    file = tmp_path / "result.json"
    assert main(["bench", "contention", "--quick", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["machine"]["device"] == "gpu" and result["rows"]
    out = capsys.readouterr().out
    assert "slow-down" in out and "copies both ways" in out


def test_kernels_mix_as_the_reference_does(rig: Rig) -> None:
    memory = rig.cp.empty(4096, np.uint8)
    rig.fill(memory)
    assert np.array_equal(memory, reference.filled(4096))
    rig.fill(memory, combine=True)
    assert not memory.any()


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("bench", kernels.defines("bench")),
        ("seven_point", ()),
        *(
            ("byhand", kernels.defines("byhand", WORD_BYTES=word, UNPACK=unpack))
            for word in (1, 2, 4, 8, 16)
            for unpack in (0, 1)
        ),
    ],
    ids=str,
)
def test_kernels_compile(name: str, settings: Any, architecture: int) -> None:
    text = preamble(settings) + kernels.source(name)
    options = [*OPTIONS, f"-arch=compute_{architecture}"]
    made = by_nvrtc(text, f"{name}.cu", options)
    assert not made.log
    assert ".local" not in made.ptx
    assert name != "bench" or "%smid" in made.ptx
