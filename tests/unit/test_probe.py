"""``halox probe mlx5``: with a stand-in of an adapter, with none, and with one that does it wrong."""

from __future__ import annotations

import ctypes
import json
import sys

import pytest

from halox.cli import main, probe
from tests.unit import fake_verbs


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_REPEATS", 2)
    monkeypatch.setattr(probe.cuda, "gpu_count", lambda: 0)


def test_an_adapter_that_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_verbs.install(monkeypatch)
    assert main(["probe", "mlx5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["works"] and found["device"] == "mlx5_0" and found["entries_of_a_key"] == 32
    assert all(row["bytes_right"] and row["write_us"] > 0 for row in found["rows"])
    assert {row["key"] for row in found["rows"]} == {"strided", "list", "contiguous"}
    assert found["gpu_memory_by_dmabuf"] == "not tried: no usable GPU"
    assert not next(iter(fake_verbs.WIRE.adapters.values())).memory, "keys and memory are released"
    assert main(["probe", "mlx5"]) == 0
    assert "works: yes" in capsys.readouterr().out


def test_a_machine_without_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    assert main(["probe", "mlx5"]) == 1
    assert "python3-pyverbs" in capsys.readouterr().out
    fake_verbs.install(monkeypatch, ())
    assert main(["probe", "mlx5", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "works": False,
        "why_not": "this machine has no RDMA device (`ibv_devices` lists none)",
    }


def test_an_adapter_that_writes_other_bytes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_verbs.install(monkeypatch)
    right = ctypes.memmove

    def wrong(at: int, raw: bytes, n: int) -> None:
        right(at, b"\0" * n, n)

    monkeypatch.setattr(fake_verbs.ctypes, "memmove", wrong)
    assert main(["probe", "mlx5", "--json"]) == 1
    assert not json.loads(capsys.readouterr().out)["works"]
