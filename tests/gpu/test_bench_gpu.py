"""The benchmarks on a GPU: packing by hand-written kernels, timing, and kernels that hold multiprocessors."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from halox.cli import main
from halox_bench.common import reference
from halox_bench.common.rig import Buffer, Rig
from halox_bench.common.rows import Row
from halox_bench.pack import baselines, contention, on_device
from halox_bench.pack.cases import select
from halox_bench.pack.on_device import DeviceBench
from halox_bench.pack.options import PackOptions
from halox_bench.pack.placed import Placed
from halox_bench.transpose.baselines import COPY
from halox_bench.transpose.baselines_gpu import CUPY
from tests.support import require

pytestmark = pytest.mark.gpu
require("gpu")

CASES = [
    "vector/8B-64KiB",
    "hypercube/8",
    "lower_triangle/1024",
    "random_indexed/sparse-64KiB",
    "struct_24/4096",
    "LAMMPS_full/1907-1662",
    "HACC_vblock/4Ki",
    "face_x/64",
]


@pytest.fixture(scope="module")
def rig() -> Rig:
    return Rig(repeats=3)


def measured(rig: Rig, name: str, options: PackOptions) -> list[Row]:
    (case,) = select([name])
    return DeviceBench(options, rig).measure(case)


@pytest.mark.parametrize("name", CASES)
def test_every_method_gives_the_right_bytes(rig: Rig, name: str) -> None:
    options = PackOptions(directions=("pack", "unpack"), methods=("auto", "strided"), repeats=3)
    rows = measured(rig, name, options)
    assert not [row for row in rows if row.failed], [row.error for row in rows if row.failed]
    timed = {(row.name, row.direction) for row in rows if row.us}
    assert {(baselines.BY_HAND, "pack"), (baselines.BY_HAND, "unpack")} <= timed
    assert {row.destination for row in rows} >= {"device", "host"}
    assert all(row.graph_us for row in rows if row.name == "auto" and row.destination == "device")


def test_times_are_plausible(rig: Rig) -> None:
    empty = rig.clock.empty()
    assert 0.2 < empty.graph_us < empty.us * 1.5 < 30
    assert 0.1e6 < rig.bytes_per_us < 20e6  # 0.1 to 20 TB/s
    assert 1e3 < rig.link_bytes_per_us("host") < 1e6


def test_filling(rig: Rig) -> None:
    memory = rig.cp.empty(1 << 20, np.uint8)
    rig.fill(memory)
    assert np.array_equal(memory.get(), reference.filled(1 << 20))
    rig.fill(memory, combine=True)
    assert not memory.any()


def test_cold_is_not_faster_than_warm(rig: Rig) -> None:
    options = PackOptions(methods=("strided",), destinations=("device",), baselines=False)
    rows = measured(rig, "face_x/256", options)
    times = {row.cache: row.graph_us for row in rows if row.name == "strided"}
    assert times["cold"] > 0.95 * times["warm"]


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_multiprocessors_are_held_and_released(rig: Rig, share: float) -> None:
    neighbour = contention.Neighbour(rig)
    began = time.monotonic()
    with neighbour.holding(share) as note:
        assert note == "", note
        assert neighbour.busy
        time.sleep(0.05)
        assert neighbour.busy
    assert not neighbour.busy
    assert time.monotonic() - began < 1


def test_packing_starves_on_a_full_gpu_and_ends_with_its_neighbour(rig: Rig) -> None:
    neighbour = contention.Neighbour(rig)
    (case,) = select(["vector/128B-1MiB"])
    with Placed(rig, case) as placed:
        expect_starving(rig, placed, rig.buffer("device", case.payload), neighbour)


def expect_starving(
    rig: Rig, placed: Placed, buffer: Buffer, neighbour: contention.Neighbour
) -> None:
    packer = on_device.make_packer("strided", placed.datatype, 1, rig.device)

    def call() -> None:
        packer.pack(placed.addresses[0], buffer.address(0), rig.stream.ptr)

    call()
    rig.stream.synchronize()
    alone = contention._patient_us(rig, call, None)
    assert alone is not None
    with neighbour.holding(1.0):
        assert contention._patient_us(rig, call, neighbour) is None
    rig.stream.synchronize()
    with neighbour.taking_turns():
        assert contention._patient_us(rig, call, neighbour) is not None
    rig.stream.synchronize()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    words = ["--patterns", "face_x/64,vector/128B-1MiB", "--repeats", "3"]
    assert main(["bench", "pack", *words, "--json", str(file), "--plot", str(tmp_path)]) == 0
    result = json.loads(file.read_text())
    assert result["machine"]["device"] == "gpu" and result["machine"]["gpus"]
    assert "large copies: device" in capsys.readouterr().out
    assert {path.name for path in tmp_path.glob("*.png")} >= {"bandwidth-pack-device.png"}


@pytest.mark.parametrize(
    "words",
    [
        "--sizes 96x130,20x33x40,6x7x8x9 --axes 10,210,021,120,3120 --dtype c16,f4",
        "--sizes 65x66 --axes 10 --dtype u1,u2,f8 --components 1,3",
    ],
)
def test_transposes(words: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    assert main(["bench", "transpose", *words.split(), "--repeats", "3", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert not [row["error"] for row in rows if row["failed"]]
    timed = {(row["name"], row["mode"]) for row in rows if row["us"]}
    for name in ("selected", COPY, CUPY):
        assert {(name, "stream"), (name, "graph")} <= timed
    assert {row["error"] for row in rows if row["name"] == "selected"} == {""}


def test_milc(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    assert main(["bench", "milc", "--quick", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 4 and not [row["error"] for row in rows if row["error"]]
    for row in rows:
        assert row["checked"] and row["mode"] == "graph" and row["stream_us"] and row["exchange_us"]
        assert row["share"] > 0 and row["over_floor"] > 0
