"""Halo exchange between ranks on CPU cores, beside the same with mpi4py's subarray types."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from halox.cli import launcher

WORKER = Path(__file__).parents[1] / "exchange_worker.py"


class Faces:
    """Both faces normal to one axis of an N^3 float64 block, periodic, halo 1; the slowest rank."""

    params = ([64, 128], [2, 4], ["x", "z"])
    param_names = ("N", "ranks", "faces")
    timeout = 600
    number = 1
    repetitions = 300

    @classmethod
    def small(cls) -> Faces:
        tiny = cls()
        tiny.params = ([8], [2], ["x", "z"])
        tiny.repetitions = 3
        return tiny

    def setup_cache(self) -> dict[tuple[int, int, str], dict[str, Any]]:
        sizes, rank_counts, faces = self.params
        return {
            (n, ranks, axis): self._measure(n, ranks, axis)
            for n in sizes
            for ranks in rank_counts
            for axis in faces
        }

    def _measure(self, n: int, ranks: int, axis: str) -> dict[str, Any]:
        ended = subprocess.run(
            launcher.command(
                launcher.find(), ranks, [str(WORKER), str(n), axis, str(self.repetitions)]
            ),
            env=launcher.environment(ranks),
            capture_output=True,
            text=True,
            timeout=self.timeout,
            check=False,
        )
        if ended.returncode != 0:
            raise RuntimeError(f"{ranks} ranks failed:\n{ended.stderr}")
        figures: dict[str, Any] = json.loads(ended.stdout)
        return figures

    def track_exchange(self, measured: Any, n: int, ranks: int, faces: str) -> float:
        return float(measured[n, ranks, faces]["halox_us"])

    track_exchange.unit = "us"  # type: ignore[attr-defined]

    def track_time_over_mpi4py(self, measured: Any, n: int, ranks: int, faces: str) -> float:
        figures = measured[n, ranks, faces]
        return float(figures["halox_us"] / figures["mpi4py_us"])

    track_time_over_mpi4py.unit = "ratio"  # type: ignore[attr-defined]

    def track_bytes_sent(self, measured: Any, n: int, ranks: int, faces: str) -> int:
        return int(measured[n, ranks, faces]["bytes_sent"])

    track_bytes_sent.unit = "bytes"  # type: ignore[attr-defined]
