"""``halox info --check`` on four ranks of two nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mpi4py import MPI

from halox.cli import links

pytestmark = [pytest.mark.ranks(4), pytest.mark.usually(4)]


def test_check_of_links(
    comm: MPI.Intracomm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Any network is slow beside an adapter of a terabyte a second, which /sys claims here."""
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("8000 Gb/sec (4X)\n")
    monkeypatch.setenv("HALOX_NODE", str(comm.rank % 2))
    monkeypatch.setattr(links, "_MOST_BYTES", 1 << 20)
    status = links.show(comm, as_json=True, root=tmp_path)
    said = capsys.readouterr().out
    assert comm.allgather(status) == [status] * comm.size
    if comm.rank > 0:
        assert said == ""
        return
    figures = json.loads(said)
    rows = {row["link"]: row for row in figures["rows"]}
    assert figures["ranks"] == comm.size and not figures["cut_short"]
    assert {*rows} == {"network", "shared memory"}
    assert all(row["slowest_GB/s"] > 0 and row["by"].count("/") == 1 for row in rows.values())
    assert rows["network"]["expected_GB/s"] == 1000 and rows["network"]["ratio"] < 1 / 3
    (named,) = [line for line in figures["findings"] if "mlx5_0 port 1" in line]
    assert named.startswith(("TCP in place of RDMA, ranks ", "unused adapter, ranks "))
    assert status == 1
