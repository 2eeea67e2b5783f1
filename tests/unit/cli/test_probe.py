"""``halox probe mlx5``: with a simulated adapter, without an adapter, and with an adapter that writes wrong bytes."""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from halox.cli import main
from halox.paths.scatter_gather.mlx5 import probe
from tests import support
from tests.fakes import fake_verbs
from tests.fakes.fake_driver import fake_driver


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_REPEATS", 2)


def test_an_adapter_that_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_verbs.install(monkeypatch)
    assert main(["probe", "mlx5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["works"] and found["device"] == "mlx5_0" and found["entries_of_a_key"] == 32
    assert all(row["bytes_right"] and row["write_us"] > 0 for row in found["rows"])
    assert {row["key"] for row in found["rows"]} == {"strided", "list", "contiguous"}
    assert not next(iter(fake_verbs.WIRE.adapters.values())).memory, "keys and memory are released"


class Memory:
    """A CuPy array, in memory that the simulated driver exports."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.size, self.nbytes = values, values.size, values.nbytes
        self.data, self.device = SimpleNamespace(ptr=values.ctypes.data), SimpleNamespace(id=0)

    def __getitem__(self, index: slice) -> Memory:
        return Memory(self.values[index])

    def get(self) -> np.ndarray:
        return self.values.copy()


@pytest.mark.parametrize("broken", ["nothing", "driver", "adapter", "bytes"])
@pytest.mark.part(2)
def test_memory_of_a_gpu(
    broken: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """The adapter writes and reads it, not from the begin of a page; otherwise the output has the reason."""
    support.require("nvrtc")  # comes with the bindings of the driver
    support.require("cxx")
    fake_verbs.install(monkeypatch)
    with fake_driver() as driver:

        def full(nbytes: int, value: int, dtype: str) -> Memory:
            path = tmp_path / "gpu"
            path.write_bytes(bytes([value]) * nbytes)
            with path.open("r+b") as file:
                found = np.frombuffer(mmap.mmap(file.fileno(), 0), dtype)
            if broken == "bytes":  # not the exported bytes
                path = tmp_path / "other"
                path.write_bytes(bytes(nbytes))
            driver.files.append((found.ctypes.data, nbytes, str(path)))
            return Memory(found)

        device = SimpleNamespace(synchronize=lambda: None)
        cupy = SimpleNamespace(full=full, cuda=SimpleNamespace(Device=lambda: device))
        monkeypatch.setattr(probe.cuda, "gpu_count", lambda: 1)
        monkeypatch.setattr(probe.cuda, "cupy", lambda: cupy)
        driver.has_dmabufs = broken != "driver"
        fake_verbs.REFUSED[:] = ["all"] * (broken == "adapter")
        try:
            assert main(["probe", "mlx5", "--json"]) == 0
        finally:
            fake_verbs.REFUSED.clear()
    found = json.loads(capsys.readouterr().out)["gpu_memory_by_dmabuf"]
    said = {
        "nothing": "yes",
        "driver": "NOT_SUPPORTED",
        "adapter": "refuses to register",
        "bytes": "no: other bytes arrived than were sent",
    }[broken]
    assert said in found and (found == "yes") == (broken == "nothing")
    assert not next(iter(fake_verbs.WIRE.adapters.values())).memory or broken in (
        "driver",
        "adapter",
    )


def test_a_machine_without_an_adapter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    assert main(["probe", "mlx5"]) == 1
    assert "python3-pyverbs" in capsys.readouterr().out
    fake_verbs.install(monkeypatch, ())
    assert main(["probe", "mlx5", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["works"] and "no RDMA device" in found["why_not"]


def test_an_adapter_that_writes_wrong_bytes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_verbs.install(monkeypatch)
    right = ctypes.memmove

    def wrong(at: int, raw: bytes, n: int) -> None:
        right(at, b"\0" * n, n)

    monkeypatch.setattr(fake_verbs.ctypes, "memmove", wrong)
    assert main(["probe", "mlx5", "--json"]) == 1
    assert not json.loads(capsys.readouterr().out)["works"]
