"""``halox tune`` on ranks without a GPU."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
from mpi4py import MPI

from halox.cli import tune

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.usually(2)]


def test_without_a_gpu_there_is_nothing_to_tune(
    comm: MPI.Intracomm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tune.tune_on_ranks(Namespace(device="cpu", dry_run=False, json=True), comm) == 0
    said = capsys.readouterr().out
    if comm.rank == 0:
        figures = json.loads(said)
        assert figures["ranks"] == comm.size and figures["file"] is None
        assert "nothing to tune" in figures["note"]
    assert not list(tmp_path.iterdir())
