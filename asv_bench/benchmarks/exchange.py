"""Halo exchange and ping-pongs between ranks on CPU cores, beside mpi4py; all run the ``halox bench`` command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

SELECTED = "selected"
MPI_TYPES = "mpi4py types, Isend/Irecv"
PINGPONG_TYPES = "mpi4py types"
MPI_PACK = "MPI_Pack + mpi4py"
HALOX_PACK = "halox.pack + mpi4py"
BY_HAND = "pack by hand + mpi4py"


def measured(kind: str, *words: str, limit_s: float) -> list[dict[str, Any]]:
    """Rows of ``halox bench KIND``."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        ended = subprocess.run(
            [sys.executable, "-m", "halox", "bench", kind, *words, "--json", str(file)],
            env=dict(os.environ),
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        if ended.returncode != 0:
            raise RuntimeError(f"{kind} {' '.join(words)} failed:\n{ended.stdout}{ended.stderr}")
        rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return rows


class Faces:
    """Both faces normal to one axis of an N^3 float64 block, periodic, halo 1; the slowest rank."""

    params = ([64, 128], [2, 4], ["x", "z", "all"])
    param_names = ("N", "ranks", "faces")
    timeout = 600
    number = 1
    batches = 21

    @classmethod
    def small(cls) -> Faces:
        tiny = cls()
        tiny.params = ([8], [2], ["x", "all"])
        tiny.batches = 1
        return tiny

    def setup_cache(self) -> dict[tuple[int, int, str], dict[str, Any]]:
        sizes, rank_counts, faces = self.params
        found: dict[tuple[int, int, str], dict[str, Any]] = {}
        for ranks in rank_counts:
            words = ["-n", str(ranks), "--device", "cpu", "--repeats", str(self.batches)]
            words += ["--sizes", ",".join(map(str, sizes)), "--faces", ",".join(faces)]
            for row in measured("exchange", *words, limit_s=self.timeout):
                key = row["shape"][0], ranks, row["faces"]
                found.setdefault(key, {"bytes": row["bytes_each_way"]})[row["name"]] = row["us"]
        return found

    def track_exchange(self, measured: Any, n: int, ranks: int, faces: str) -> float:
        return float(measured[n, ranks, faces][SELECTED])

    track_exchange.unit = "us"  # type: ignore[attr-defined]

    def track_time_over_mpi4py(self, measured: Any, n: int, ranks: int, faces: str) -> float:
        figures = measured[n, ranks, faces]
        return float(figures[SELECTED] / figures[MPI_TYPES])

    track_time_over_mpi4py.unit = "ratio"  # type: ignore[attr-defined]

    def track_bytes_sent(self, measured: Any, n: int, ranks: int, faces: str) -> int:
        return int(measured[n, ranks, faces]["bytes"])

    track_bytes_sent.unit = "bytes"  # type: ignore[attr-defined]


class PingPong:
    """Typed messages there and back between two ranks; half a round trip."""

    params = ([256, 1024], ["vector", "triangle", "vector-contiguous", "transpose"])
    param_names = ("N", "pattern")
    timeout = 600
    number = 1
    batches = 21

    @classmethod
    def small(cls) -> PingPong:
        tiny = cls()
        tiny.params = ([16], ["vector", "transpose"])
        tiny.batches = 1
        return tiny

    def setup_cache(self) -> dict[tuple[int, str], dict[str, float]]:
        sizes, patterns = self.params
        words = ["-n", "2", "--where", "host", "--repeats", str(self.batches)]
        words += ["--sizes", ",".join(map(str, sizes)), "--patterns", ",".join(patterns)]
        found: dict[tuple[int, str], dict[str, float]] = {}
        for row in measured("pingpong", *words, limit_s=self.timeout):
            found.setdefault((row["n"], row["pattern"]), {})[row["name"]] = row["half_us"]
        return found

    def track_half_trip(self, measured: Any, n: int, pattern: str) -> float:
        return float(measured[n, pattern][SELECTED])

    track_half_trip.unit = "us"  # type: ignore[attr-defined]

    def track_time_over_mpi4py(self, measured: Any, n: int, pattern: str) -> float:
        figures = measured[n, pattern]
        return float(figures[SELECTED] / figures[PINGPONG_TYPES])

    track_time_over_mpi4py.unit = "ratio"  # type: ignore[attr-defined]


class _Messages:
    """A benchmark of ``halox bench`` between two ranks, as half a round trip of each pattern; asv leaves it out."""

    kind = ""
    params: tuple[list[str], ...] = ([],)
    few: tuple[str, ...] = ()
    param_names = ("pattern",)
    timeout = 600
    number = 1
    batches = 21

    @classmethod
    def small(cls) -> Self:
        tiny = cls()
        tiny.params = (list(cls.few),)
        tiny.batches = 1
        return tiny

    def setup_cache(self) -> dict[str, dict[str, dict[str, Any]]]:
        words = ["-n", "2", "--where", "host", "--repeats", str(self.batches)]
        words += ["--patterns", ",".join(self.params[0])]
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for row in measured(self.kind, *words, limit_s=self.timeout):
            found.setdefault(row["case"], {})[row["name"]] = row
        return found

    def track_half_trip(self, measured: Any, pattern: str) -> float:
        return float(measured[pattern][SELECTED]["half_us"])

    track_half_trip.unit = "us"  # type: ignore[attr-defined]


class DdtBench(_Messages):
    """DDTBench's patterns there and back between two ranks."""

    kind = "ddtbench"
    params = (
        [
            "WRF_x_vec/2x2",
            "WRF_y_sa/2x2",
            "MILC_su3_zdown/16x16x16x16",
            "NAS_LU_y/1020",
            "NAS_MG_x/258x130x130",
            "LAMMPS_full/3534-3062",
            "SPECFEM3D_cm/c4",
            "SPECFEM3D_mt/c1",
            "FFT2/512",
        ],
    )
    few = ("NAS_LU_y/12", "SPECFEM3D_oc/c1")

    def track_time_over_mpi4py(self, measured: Any, pattern: str) -> float:
        rows = measured[pattern]
        return float(rows[SELECTED]["half_us"] / rows[PINGPONG_TYPES]["half_us"])

    track_time_over_mpi4py.unit = "ratio"  # type: ignore[attr-defined]

    def track_packing_over_mpi_pack(self, measured: Any, pattern: str) -> float:
        rows = measured[pattern]
        return float(rows[HALOX_PACK]["pack_us"] / rows[MPI_PACK]["pack_us"])

    track_packing_over_mpi_pack.unit = "ratio"  # type: ignore[attr-defined]


class ScatterGather(_Messages):
    """Strided messages there and back between two ranks, beside packing by hand."""

    kind = "scatter_gather"
    params = (
        [
            "vector-1KiB/64",
            "vector-4KiB/64",
            "stencil-y/128^3",
            "MILC_su3_zd/16x32x32x32",
            "NAS_MG_y/1024x66x66",
            "SPECFEM3D_mt/1024x2x64",
        ],
    )
    few = ("vector-1KiB/16", "SPECFEM3D_mt/1024x2x32")

    def track_time_over_packing_by_hand(self, measured: Any, pattern: str) -> float:
        rows = measured[pattern]
        return float(rows[SELECTED]["half_us"] / rows[BY_HAND]["half_us"])

    track_time_over_packing_by_hand.unit = "ratio"  # type: ignore[attr-defined]

    def track_keys_of_an_adapter(self, measured: Any, pattern: str) -> int:
        return int(measured[pattern][SELECTED]["adapter_keys"])

    track_keys_of_an_adapter.unit = "keys"  # type: ignore[attr-defined]
