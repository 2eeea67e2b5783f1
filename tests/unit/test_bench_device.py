"""The benchmarks of packing on a GPU, their logic and their kernels, without one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halox.cli import main
from halox.errors import DeviceError
from halox.runtime.gpu.compiler import OPTIONS, preamble
from halox_bench.common import byhand, kernels, neighbour, reference
from halox_bench.common.layouts import Box, Boxes
from halox_bench.common.rig import Rig
from halox_bench.common.sizes import KIB
from halox_bench.common.targets import figure
from halox_bench.pack import baselines, contention, on_device, synthetic, targets
from halox_bench.pack.cases import select
from halox_bench.pack.options import Options
from halox_bench.pack.patterns import Case
from halox_bench.pack.placed import Placed
from halox_bench.pack.rows import COPY, Row
from tests.support import require
from tests.unit import bench_gpu
from tests.unit.nvrtc import by_nvrtc

require("cxx")

SILENT = str.strip

CASES = [
    "vector_512/8B-64KiB",
    "vector/16KiB-64KiB",
    "hypercube/4",
    "lower_triangle/1024",
    "upper_triangle/1024",
    "random_indexed/dense-64KiB",
    "struct_24/4096",
    "WRF_x_vec/8x8",
    "WRF_y_sa/2x2",
    "MILC_su3_zdown/8x8x8x8",
    "NAS_LU_x/33",
    "NAS_MG_x/34x18x18",
    "LAMMPS_full/1907-1662",
    "SPECFEM3D_cm/c1",
    "SPECFEM3D_mt/c3",
    "FFT2/256",
    "HACC_vblock/4Ki",
    "face_x/64",
    "face_y/64",
]


# Another kind of layout each; the others are run in the whole matrix, and moved by hand in any case.
KINDS = {
    *("vector_512/8B-64KiB", "hypercube/4", "lower_triangle/1024", "random_indexed/dense-64KiB"),
    *("struct_24/4096", "WRF_y_sa/2x2", "MILC_su3_zdown/8x8x8x8", "SPECFEM3D_cm/c1", "FFT2/256"),
    "face_x/64",
}


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    bench_gpu.install(monkeypatch)
    monkeypatch.setattr(on_device._Bench, "_public_host_us", lambda self: 3.5)
    monkeypatch.setattr(synthetic, "HYPERCUBE", 16)
    return Rig(repeats=3)


def measured(rig: Rig, names: list[str], **options: Any) -> list[Row]:
    chosen = Options(patterns=tuple(names), **options)
    return list(on_device.run(rig, select(names), chosen, SILENT))


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
        # Guard bytes around what may be written.
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
        monkeypatch.setattr(byhand, "THREADS", 64)  # not what the table is made with
        (case,) = select(["face_x/64"])
        layout = Boxes((Box(8, (64, 64), (34848, 520), case.by_hand.boxes[0].offset),))
        changed = Case(
            case.pattern, case.size, case.arrays, case.build, case.payload, by_hand=layout
        )
        rows = list(on_device.run(rig, [changed], Options(methods=("strided",)), SILENT))
        failed = {row.method for row in rows if row.failed}
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
        rows = measured(rig, [name], methods=("strided",), directions=(direction,))
        names = {row.method for row in rows if row.kind == "baseline" and not row.error}
        wanted = (
            baselines.MEMCPY_3D if name in ("hypercube/4", "face_x/64") else baselines.MEMCPY_2D
        )
        assert wanted in names, rows


class TestRun:
    @pytest.mark.parametrize(
        "name",
        [pytest.param(name, marks=() if name in KINDS else pytest.mark.full) for name in CASES],
    )
    def test_every_kind_of_case(self, rig: Rig, name: str) -> None:
        directions = ("pack",) if name.startswith("struct") else ("pack", "unpack")
        rows = measured(rig, [name], directions=directions, methods=("auto", "workunits"))
        assert not [row for row in rows if row.failed], [row.error for row in rows if row.failed]
        assert {row.destination for row in rows} == {"device", "host", "peer"}
        assert {row.direction for row in rows} == set(directions)
        timed = [row for row in rows if not row.error]
        assert all(row.us > 0 and row.gb_per_s > 0 and row.of_bound > 0 for row in timed)
        assert all(row.of_copy == 1 for row in timed if row.method == COPY)
        public = [row for row in timed if row.method == "auto" and row.destination == "device"]
        assert all(row.host_us == 3.5 and row.note == "strided" for row in public)

    def test_caches(self, rig: Rig) -> None:
        rows = measured(rig, ["face_x/64"], destinations=("device",), methods=("strided",))
        assert {row.cache for row in rows} == {"warm", "cold"}
        assert {row.sector_bytes for row in rows} == {64 * 64 * 32}
        rows = measured(rig, ["vector/8B-1MiB"], destinations=("device",), methods=("strided",))
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

    def test_types_that_a_packer_does_not_take_are_no_failure(self, rig: Rig) -> None:
        rows = measured(rig, ["lower_triangle/1024"], methods=("copy_engine", "strided"))
        refused = [row for row in rows if row.method == "copy_engine"]
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
        rows = measured(rig, ["face_y/64"], methods=("strided",), directions=(direction,))
        ours = [row for row in rows if row.kind == "packer"]
        assert ours and all(row.failed and "wrong result" in row.error for row in ours)
        assert not any(row.failed for row in rows if row.kind == "baseline")

    def test_an_exception_is_a_row(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(method: str, *given: Any, **named: Any) -> Any:
            if method == "traversal":
                raise RuntimeError("no such kernel")
            return bench_gpu.make_packer(method, *given, **named)

        monkeypatch.setattr(on_device, "make_packer", broken)
        rows = measured(rig, ["face_y/64"], methods=("traversal", "strided"))
        assert {row.method for row in rows if row.failed} == {"traversal"}
        assert all(row.us for row in rows if row.method == "strided")

    def test_a_baseline_that_does_not_compile_is_a_row(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: Any) -> Any:
            raise RuntimeError("no compiler")

        monkeypatch.setattr(baselines, "prepare", broken)
        rows = measured(rig, ["face_y/64"], methods=("strided",))
        assert {row.method for row in rows if row.failed} == {baselines.BY_HAND}

    def test_no_memory_for_packed_bytes(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(nbytes: int) -> Any:
            raise DeviceError("cannot page-lock")

        rig.link_bytes_per_us("host")
        monkeypatch.setattr("halox_bench.common.rig.pinned", refuse)
        rows = measured(rig, ["face_y/64"], methods=("strided",))
        (left_out,) = [row for row in rows if row.destination == "host"]
        assert "page-lock" in left_out.error and not left_out.failed
        assert any(row.destination == "peer" and row.us for row in rows)

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
            measured(rig, ["face_y/64"], methods=("strided",))

    def test_too_large_for_the_device(self, rig: Rig) -> None:
        (row,) = measured(rig, ["vector_512/8B-64MiB"])
        assert "left out" in row.error and not row.failed

    def test_many_blocks_are_extrapolated(self, rig: Rig) -> None:
        rows = measured(rig, ["vector/8B-64KiB"], methods=("strided",))
        (row, *_) = [row for row in rows if row.method == baselines.BLOCK_COPIES]
        assert row.note == "extrapolated from 256 of 8192 blocks"


class TestCommand:
    def run(
        self, monkeypatch: pytest.MonkeyPatch, folder: Path, words: str, status: int = 0
    ) -> dict[str, Any]:
        from halox.runtime.gpu import cuda

        bench_gpu.install(monkeypatch)
        monkeypatch.setattr(cuda, "cupy", lambda: bench_gpu.fake_cupy(1 << 20))
        monkeypatch.setattr(cuda, "why_no_gpu", lambda: None)
        monkeypatch.setattr(on_device._Bench, "_public_host_us", lambda self: 3.5)
        file = folder / "result.json"
        assert main(["bench", "pack", *words.split(), "--json", str(file)]) == status
        return json.loads(file.read_text())

    def test_pack(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = "--patterns vector/8B-64KiB,vector/128B-64KiB --repeats 1 --direction pack"
        result = self.run(monkeypatch, tmp_path, f"{words} --plot {tmp_path / 'plots'}")
        assert result["machine"]["device"] == "gpu"
        assert {row["method"] for row in result["rows"]} >= {"auto", "traversal", COPY}
        out = capsys.readouterr().out
        assert "large copies: device" in out and "kernel by hand" in out
        drawn = {path.name for path in (tmp_path / "plots").iterdir()}
        assert drawn == {"bandwidth.png", "memcpy2d.png", "destinations.png"}

    def test_contention(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        small_contention(monkeypatch)
        result = self.run(monkeypatch, tmp_path, "--contention --quick")
        lines = result["contention"]
        assert {line["neighbour"] for line in lines} >= {
            "50% of the SMs held",
            "100% of the SMs held",
            "copies both ways",
        }
        assert {line["destination"] for line in lines} == {"device", "host"}
        assert all(line["alone_us"] > 0 for line in lines)
        assert "slowdown" in capsys.readouterr().out

    def test_targets(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        small_targets(monkeypatch)
        result = self.run(monkeypatch, tmp_path, "--targets")
        assert not [one for one in result["targets"] if "failed" in one]
        assert "x-face" in capsys.readouterr().out


class Ticks:
    """A clock that goes on when it is looked at, so that no machine is too busy to be in time."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        self._now += 1e-5
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


def small_contention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contention, "CASES", ((8, 64 * KIB), (128, 64 * KIB)))
    monkeypatch.setattr(neighbour, "_COPY_BYTES", 1 << 16)
    monkeypatch.setattr(neighbour, "PATIENCE_S", 20e-5)
    ticks = Ticks()
    for module in (contention, neighbour):
        monkeypatch.setattr(module, "time", ticks)


def small_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink the cases, so that host memory is fast enough."""
    import halox

    smaller = {
        "lower_triangle/8192": "lower_triangle/1024",
        "lower_triangle/4096": "lower_triangle/1024",
        "face_x/512": "face_x/64",
        "random_indexed/dense-64MiB": "random_indexed/dense-64KiB",
        "random_indexed/sparse-64MiB": "random_indexed/sparse-64KiB",
        "HACC_vblock/32Ki": "HACC_vblock/4Ki",
        "HACC_particles/32Ki": "HACC_particles/4Ki",
    }
    case, runs = targets._case, synthetic.runs
    monkeypatch.setattr(targets, "_case", lambda name: case(smaller.get(name, name)))
    monkeypatch.setattr(
        targets.synthetic,
        "runs",
        lambda pattern, block, stride, payload: runs(pattern, block, stride, 64 * KIB),
    )
    monkeypatch.setattr(neighbour, "_COPY_BYTES", 1 << 16)
    monkeypatch.setattr(neighbour, "PATIENCE_S", 0.05)
    monkeypatch.setattr(targets, "REPEATS", 3)
    monkeypatch.setattr(halox, "pack", lambda *given, **named: None)


class TestContention:
    @pytest.fixture
    def small(self, monkeypatch: pytest.MonkeyPatch, rig: Rig) -> Rig:
        small_contention(monkeypatch)
        return rig

    def test_all_neighbours(self, small: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bench_gpu.Stream, "done", False)  # neighbours that stay
        lines = list(contention.run(small, SILENT, quick=True))
        assert len({line.neighbour for line in lines}) == 8
        assert all(line.slowdown == line.us / line.alone_us - 1 for line in lines)
        assert not any(line.note for line in lines)

    def test_neighbours_that_ended_too_early(self, small: Rig) -> None:
        notes = {line.note for line in contention.run(small, SILENT, quick=True)}
        assert notes == {"", "the neighbour had ended before"}

    def test_starving(self, small: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        # Nothing ends while the kernel holds anything.
        held = []

        def hold(launch: bench_gpu.Launch, stream: int) -> None:
            if launch._function[1] == "hold":
                held[:] = [launch.args[3].value]
            original(launch, stream)

        original = bench_gpu.Launch.launch
        monkeypatch.setattr(bench_gpu.Launch, "launch", hold)
        monkeypatch.setattr(bench_gpu.Event, "done", property(lambda self: not (held and held[0])))
        lines = list(contention.run(small, SILENT, quick=True))
        starved = [line for line in lines if line.us is None]
        assert starved and all(line.slowdown is None for line in starved)
        assert all("starved" in line.note or "alone" in line.note for line in starved)

    def test_a_packer_that_refuses_is_a_line(
        self, small: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(method: str, *given: Any, **named: Any) -> Any:
            if method == "copy_engine":
                raise DeviceError("no such engine")
            return bench_gpu.make_packer(method, *given, **named)

        monkeypatch.setattr(contention, "make_packer", refuse)
        lines = list(contention.run(small, SILENT, quick=True))
        refused = [line for line in lines if line.method == "copy_engine"]
        assert refused and all("no such engine" in line.note for line in refused)
        assert any(line.us for line in lines if line.method == "strided")


class TestTargets:
    def test_all_figures(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bench_gpu.install(monkeypatch)
        small_targets(monkeypatch)
        found = targets.measure()
        assert len(found) >= 25
        for one in found:
            assert set(one) >= {
                "name",
                "value",
                "unit",
                "baseline",
                "baseline_name",
                "target",
                "met",
            }
            assert "failed" not in one and one["value"] is not None, one
            within = (
                one["value"] <= one["target"] if one["at_most"] else one["value"] >= one["target"]
            )
            assert one["met"] == within or math.isclose(one["value"], one["target"], abs_tol=1e-4)
        names = [one["name"] for one in found]
        assert len(set(names)) == len(names)
        for word in ("cold, in a graph", "warm, in a stream", "over strided"):
            assert any(word in name for name in names), word

    def test_a_failure_leaves_the_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bench_gpu.install(monkeypatch)
        small_targets(monkeypatch)

        def refuse(*_: Any, **__: Any) -> Any:
            raise DeviceError("no memory")

        monkeypatch.setattr(contention, "half_busy_slowdown", refuse)
        found = {one["name"]: one for one in targets.measure()}
        assert found["half the GPU busy"]["failed"] == "DeviceError: no memory"
        assert found["half the GPU busy"]["met"] is None and len(found) > 20

    def test_the_time_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bench_gpu.install(monkeypatch)
        found = targets.measure(budget_s=-1.0)
        assert all("left out" in one["failed"] for one in found)

    def test_figure(self) -> None:
        at_least = figure("n", 0.9, "share", 0.9, 1.0, "us")
        at_most = figure("n", 1.2, "x", 1.1, 1.0, "us", at_most=True)
        assert at_least["met"] and not at_most["met"]
        starved = figure("n", math.inf, "share", 0.05, 1.0, "us", at_most=True, us=math.inf)
        assert starved["value"] is None is starved["us"] and starved["met"] is False


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
        ("jacobi", ()),
        ("seven_point", ()),
        *(("tile", kernels.defines("tile", ELEMENT_BYTES=n)) for n in (1, 2, 4, 8, 16)),
        *(
            ("byhand", kernels.defines("byhand", WORD_BYTES=word, UNPACK=unpack))
            for word in (1, 2, 4, 8, 16)
            for unpack in (0, 1)
        ),
    ],
    ids=str,
)
def test_kernels_compile(name: str, settings: Any, architecture: int) -> None:
    rooms = {"jacobi": "allreduce", "seven_point": "exchange", "tile": "transpose"}
    room = rooms.get(name, "common")
    text = preamble(settings) + kernels.source(name, f"halox_bench.{room}")
    options = [*OPTIONS, f"-arch=compute_{architecture}"]
    made = by_nvrtc(text, f"{name}.cu", options)
    assert not made.log
    assert ".local" not in made.ptx
    assert name != "bench" or "%smid" in made.ptx
