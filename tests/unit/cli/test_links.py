"""``halox info --check``: kinds of links, expected rates, causes; on imagined machines and measurements."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from halox.cli import info
from halox.cli.info import Machine
from halox.cli.links import Link, findings, judge, rounds, table

PLENTY = 1 << 40
GPUS = "0000:1b:00.0", "0000:43:00.0"
NVLINK = {GPUS: 450, GPUS[::-1]: 450}
FAST = 400.0, "mlx5_0 port 1"


def machine(core: int = 0, **facts: Any) -> Machine:
    return Machine(**{"host": "a", "cores": frozenset({core}), "shared_bytes": PLENTY} | facts)


def judged(link: Link, a: Machine, b: Machine) -> Link:
    return judge(link, (0, 0 if a.host == b.host else 1), (a, b))


def found(link: Link, a: Machine, b: Machine) -> list[str]:
    return findings([judged(link, a, b)], (a, b), None)


def test_thousands_of_ranks_take_few_rounds() -> None:
    assert len(rounds([rank // 64 for rank in range(4096)], [""] * 4096)) < 5 * 64


# Expected rates


def test_the_slower_end_limits_a_link() -> None:
    a, b = machine(gpu=GPUS[0], pcie=63.0), machine(1, gpu=GPUS[1], pcie=31.5)
    assert judged(Link((0, 1), rate=25.0, path="peer/direct"), a, b).expected == 31.5
    a, b = machine(network=FAST), machine(host="b", network=(25.0, "mlx5_3 port 1"))
    assert judged(Link((0, 1), rate=20.0, path="host/mpi"), a, b).source == "mlx5_3 port 1"


def test_an_unknown_rate_is_no_shortfall() -> None:
    a, b = machine(), machine(host="b", network=FAST)
    link = judged(Link((0, 1), rate=0.1, path="host/mpi"), a, b)
    assert link.kind == "network" and link.ratio == 1 and found(link, a, b) == []
    row = table([link])[0]
    assert row["expected_GB/s"] is None and row["ratio"] is None


# Causes


def by(path: str, rate: float, expected: float = 0.0, **why_not: str) -> Link:
    return Link((0, 1), rate, expected, path, why_not)


def hosts(*rdma: bool | None, gpu: str = "") -> tuple[Machine, ...]:
    """Return two machines with an adapter, which uses RDMA or not, or with TCP only (None)."""
    return tuple(
        machine(host=host, gpu=gpu, network=(2.5, "eth0") if has is None else FAST, rdma=has)
        for host, has in zip("ab", rdma, strict=True)
    )


def gpus(nvlink: Any) -> tuple[Machine, ...]:
    return tuple(machine(n, gpu=GPUS[n], nvlink=nvlink, pcie=63.0) for n in range(2))


ONE_GPU = machine(0, gpu=GPUS[0]), machine(1, gpu=GPUS[0])


@pytest.mark.parametrize(
    ("cause", "link", "ends"),
    [
        ("TCP in place of RDMA, ranks 0, 1: 2 GB/s", by("host/mpi", 2.0), hosts(False, False)),
        ("TCP in place of RDMA", by("host/mpi", 1.0), hosts(True, False)),
        ("unused adapter", by("host/mpi", 1.0), hosts(True, True)),
        ("slow network", by("host/mpi", 0.1), hosts(None, None)),
        ("", by("host/mpi", 2.0), hosts(None, None)),
        ("", by("host/mpi", 300.0), hosts(True, True)),
        ("slow NVLink", by("peer/direct", 80.0), gpus(NVLINK)),
        ("missing peer access", by("staged/shared", 45.0, peer="a reason"), gpus(NVLINK)),
        # Between GPUs that only PCIe connects this is no shortfall, but still worth a line.
        ("missing peer access", by("staged/shared", 45.0, peer="a reason"), gpus({})),
        ("staged copies", by("staged/mpi", 200.0, nccl="a reason"), hosts(True, True, gpu=GPUS[0])),
        (
            "staged copies",
            by("staged/mpi", 9e9, cuda_aware="a reason"),
            hosts(True, True, gpu=GPUS[0]),
        ),
        ("staged copies", by("staged/shared", 30.0, 60.0), ONE_GPU),
        ("staged copies", by("staged/shared", 30.0, 60.0), gpus({})),
        # Between an array on a GPU and a NumPy array there is no other path.
        ("", by("staged/shared", 30.0, 60.0), (machine(gpu=GPUS[0]), machine(1))),
        ("failed exchange", Link((0, 1), error="a reason"), (machine(), machine(1))),
    ],
)
def test_causes(cause: str, link: Link, ends: tuple[Machine, Machine]) -> None:
    lines = found(link, *ends)
    assert [line[: len(cause)] for line in lines] == ([cause] if cause else [])
    assert "a reason" not in repr(link) or "a reason" in lines[0]


@pytest.mark.parametrize(
    ("cause", "machines"),
    [
        ("", [machine(n) for n in range(4)]),
        (
            "oversubscribed cores, ranks 1, 2: ",
            [machine(), machine(1), machine(1), machine(1, host="b")],
        ),
        ("oversubscribed cores, ranks 0, 1, 2: ", [machine(cores=frozenset({0, 1}))] * 3),
        ("", [machine(cores=frozenset({0, 1}))] * 2),
        ("small /dev/shm, ranks 0, 1: ", [machine(n, shared_bytes=100 << 20) for n in range(2)]),
        ("", [machine(shared_bytes=100 << 20)]),
        ("GPU behind another socket, rank 1: ", [machine(), machine(1, is_far=True)]),
    ],
)
def test_causes_in_machines(cause: str, machines: list[Machine]) -> None:
    assert [line[: len(cause)] for line in findings([], machines, None)] == [cause] * bool(cause)


def test_cross_memory_attach_that_is_not_permitted() -> None:
    (line,) = findings([], [machine(), machine(1)], "the reason")
    assert line.startswith("no cross-memory attach") and "the reason" in line


# Facts of a machine


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(
        deviceGetPCIBusId=lambda device: GPUS[device].upper(),
        getDeviceProperties=lambda device: {"major": 9, "minor": 0},
    )
    fake = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(info.cuda, "cupy", lambda: fake)


@pytest.mark.parametrize(
    ("speed", "lanes", "rate"),
    [("32.0 GT/s PCIe", "16", 63.0), ("16.0 GT/s PCIe", "8", 15.75), ("Unknown", "255", 0.0)],
)
def test_pcie(speed: str, lanes: str, rate: float, tmp_path: Path, gpu: None) -> None:
    place = f"bus/pci/devices/{GPUS[1]}"
    write(tmp_path, **{f"{place}/max_link_speed": speed, f"{place}/max_link_width": lanes})
    facts = info.machine(1, tmp_path, asks_nvlinks=False)
    assert facts.gpu == GPUS[1] and facts.pcie == pytest.approx(rate, rel=1e-3)
    assert not facts.is_far and facts.nvlink == {}


@pytest.mark.parametrize(("node", "is_far"), [("0", False), ("1", True), ("-1", False)])
def test_numa_node_of_the_gpu(node: str, is_far: bool, tmp_path: Path, gpu: None) -> None:
    core = min(os.sched_getaffinity(0))
    (tmp_path / f"devices/system/node/node0/cpu{core}").mkdir(parents=True)
    (tmp_path / "devices/system/node/node1/cpu99999").mkdir(parents=True)
    write(tmp_path, **{f"bus/pci/devices/{GPUS[0]}/numa_node": node})
    assert info.machine(0, tmp_path, asks_nvlinks=False).is_far == is_far


def test_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def network() -> tuple[float, str]:
        return info.machine(None, tmp_path, asks_nvlinks=True).network

    assert network() == (0, "") and info.machine(None, tmp_path, asks_nvlinks=True).rdma is None
    for name, speed in {"eth0": "10000", "eth1": "100000", "down": "-1", "veth": "400000"}.items():
        write(tmp_path, **{f"class/net/{name}/speed": speed})
        if name != "veth":
            (tmp_path / "class/net" / name / "device").mkdir()
    assert network() == (2.5, "TCP by eth1")
    write(tmp_path, **{"class/net/eth1/speed": "-1"})
    assert network() == (1.25, "TCP by eth0")
    ports = "class/infiniband/mlx5_{}/ports/1/{}"
    for adapter, rate, state in (
        (0, "100 Gb/sec (4X EDR)", "4: ACTIVE"),
        (1, "400 Gb/sec (4X NDR)", "1: DOWN"),
    ):
        write(
            tmp_path, **{ports.format(adapter, "rate"): rate, ports.format(adapter, "state"): state}
        )
    assert network() == (12.5, "mlx5_0 port 1")
    write(tmp_path, **{ports.format(1, "state"): "4: ACTIVE"})
    facts = info.machine(None, tmp_path, asks_nvlinks=True)
    assert facts.network == (50.0, "mlx5_1 port 1")
    assert facts.rdma == ("libibverbs" in Path("/proc/self/maps").read_text())


MATRIX = """\
\033[4m\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\033[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0
GPU1\tNV18\t X \tNV4\tSYS\t0-47\t0
GPU2\tSYS\tNV4\t X \tSYS\t0-47\t0
NIC0\tPIX\tSYS\tSYS\t X \t\t

Legend:

  X    = Self
"""


def test_nvlinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    """Of a program that stands in for nvidia-smi, and without it."""
    listed = [f"0000{address.upper()}" for address in (*GPUS, "0000:8b:00.0")]
    write(tmp_path, matrix=MATRIX, listed="\n".join(listed))
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\ncd {tmp_path}\n[ "$1" = topo ] && cat matrix || cat listed\n')
    program.chmod(0o755)
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"{tmp_path}:{path}")
    assert info.nvlinks(0) == {
        GPUS: 450,
        GPUS[::-1]: 450,
        (GPUS[1], "0000:8b:00.0"): 100,
        ("0000:8b:00.0", GPUS[1]): 100,
    }
    program.write_text("#!/bin/sh\nexit 1\n")
    assert info.nvlinks(0) == {}
