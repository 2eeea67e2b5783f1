"""``halox bench`` on one GPU: every kind checks its results, and every method that should has a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halox.cli import main
from tests.support import require

pytestmark = pytest.mark.gpu
require("gpu")

COPY, BY_HAND = "copy of the same bytes", "kernel by hand"


def rows_of(words: str, folder: Path) -> list[dict[str, Any]]:
    file = folder / "rows.json"
    status = main(
        ["bench", *words.split(), "--device", "gpu", "--repeats", "2", "--json", str(file)]
    )
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    assert status == 0, [row for row in rows if row["failed"]]
    assert all(row["us"] or row["error"] for row in rows)
    return rows


def timed(rows: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(row["name"], row["mode"]) for row in rows if row["us"]}


@pytest.mark.parametrize("to", ["device", "host"])
@pytest.mark.parametrize("cold", ["", " --cold"])
def test_packing(to: str, cold: str, tmp_path: Path) -> None:
    patterns = (
        "vector/8B-64KiB,hypercube/8,lower_triangle/1024,random_indexed/*-64KiB,struct_24/4096"
    )
    patterns += ",LAMMPS_full/1907-1662,HACC_vblock/4Ki,face_x/64,WRF_x_vec/8x8,matrix/1024*"
    words = f"pack --patterns {patterns} --direction pack,unpack --to {to}{cold}"
    rows = rows_of(f"{words} --methods strided,workunits", tmp_path)
    both = {(name, mode) for name in ("selected", COPY, BY_HAND) for mode in ("stream", "graph")}
    assert both <= timed(rows)
    assert {"cudaMemcpy2D", "one copy a block"} <= {row["name"] for row in rows if row["us"]}


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("exchange --sizes 16 --faces x,all --fields 1,3 --dtype f4,c16", {"zero-copy + mpi4py"}),
        ("transpose --sizes 33x40,6x7x8x9 --axes 10,3120 --dtype c16,f4", {"CuPy's strided copy"}),
        ("fft --cells 16", {"halox.FFT backward", "one plan over all axes"}),
        ("reductions --cells 12", {"copy of the field", "halox.Allreduce"}),
        ("calls", {"launch of an empty CuPy RawKernel with five arguments"}),
        ("steps --cells 32", {"one rank", "stencil and exchange", "stencil alone"}),
        ("checkpoint --cells 16x16x16", {"grid.save", "grid.load", "copy to the host"}),
        ("allreduce --sizes 8,1KiB --dtype f8", {"D2H + MPI_Allreduce + H2D"}),
    ],
)
def test_other_kinds(words: str, names: set[str], tmp_path: Path) -> None:
    rows = rows_of(words, tmp_path)
    found = {name for name, _ in timed(rows)}
    own = {"selected"} if "checkpoint" not in words else set()
    assert names | own <= found, [row["error"] for row in rows if not row["us"]]
