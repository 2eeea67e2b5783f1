"""Checkpoints on CPU ranks beside plain writes and reads; runs ``halox bench checkpoint``."""

from __future__ import annotations

from typing import Any

from .exchange import measured


class Checkpoints:
    """`Grid.save` and `Grid.load` of float64 cells; the slowest rank."""

    params = (["256x256x256"], [1, 4])
    param_names = ("cells", "ranks")
    timeout = 600
    number = 1
    batches = 5

    @classmethod
    def small(cls) -> Checkpoints:
        tiny = cls()
        tiny.params = (["8x8x8"], [2])
        tiny.batches = 1
        return tiny

    def setup_cache(self) -> dict[tuple[str, int], dict[str, Any]]:
        sizes, rank_counts = self.params
        found: dict[tuple[str, int], dict[str, Any]] = {}
        for ranks in rank_counts:
            words = ["-n", str(ranks), "--device", "cpu", "--repeats", str(self.batches)]
            words += ["--cells", ",".join(sizes)]
            for row in measured("checkpoint", *words, limit_s=self.timeout):
                key = "x".join(map(str, row["shape"])), ranks
                found.setdefault(key, {})[row["name"]] = row
        return found

    def track_save_over_write(self, measured: Any, *chosen: Any) -> float:
        return float(measured[chosen]["grid.save"]["ratio"])

    track_save_over_write.unit = "ratio"  # type: ignore[attr-defined]

    def track_load_over_read(self, measured: Any, *chosen: Any) -> float:
        return float(measured[chosen]["grid.load"]["ratio"])

    track_load_over_read.unit = "ratio"  # type: ignore[attr-defined]
