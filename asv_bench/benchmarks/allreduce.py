"""Allreduces of NumPy arrays between ranks on CPU cores, beside mpi4py; runs ``halox bench allreduce``."""

from __future__ import annotations

from typing import Any

from .exchange import SELECTED, measured

MPI = "MPI_Allreduce"
Figures = dict[tuple[int, int], dict[str, dict[str, Any]]]


class Sums:
    """Sums of float64 arrays; the slowest rank."""

    params = ([8, 8 << 10, 1 << 20, 16 << 20], [2, 4])
    param_names = ("bytes", "ranks")
    timeout = 600
    number = 1
    batches = 21

    @classmethod
    def small(cls) -> Sums:
        tiny = cls()
        tiny.params = ([8, 1000], [2])
        tiny.batches = 1
        return tiny

    def setup_cache(self) -> Figures:
        sizes, rank_counts = self.params
        found: Figures = {}
        for ranks in rank_counts:
            words = ["-n", str(ranks), "--device", "cpu", "--repeats", str(self.batches)]
            words += ["--dtype", "f8", "--sizes", ",".join(map(str, sizes))]
            for row in measured("allreduce", *words, limit_s=self.timeout):
                found.setdefault((row["nbytes"], ranks), {})[row["name"]] = row
        return found

    def track_allreduce(self, measured: Figures, nbytes: int, ranks: int) -> float:
        return float(measured[nbytes, ranks][SELECTED]["us"])

    track_allreduce.unit = "us"  # type: ignore[attr-defined]

    def track_set_up(self, measured: Figures, nbytes: int, ranks: int) -> float:
        return float(measured[nbytes, ranks][SELECTED]["setup_us"])

    track_set_up.unit = "us"  # type: ignore[attr-defined]

    def track_time_over_mpi4py(self, measured: Figures, nbytes: int, ranks: int) -> float:
        rows = measured[nbytes, ranks]
        return float(rows[SELECTED]["us"] / rows[MPI]["us"])

    track_time_over_mpi4py.unit = "ratio"  # type: ignore[attr-defined]
