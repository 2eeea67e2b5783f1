"""Transposes of NumPy arrays on one rank and between ranks on CPU cores; runs ``halox bench transpose``."""

from __future__ import annotations

from typing import Any

from .exchange import SELECTED, measured

COPYTO = "np.copyto"
BY_MPI = ("mpi4py Alltoallw", "mpi4py Alltoallw + np.copyto")
Figures = dict[tuple[Any, ...], dict[str, dict[str, Any]]]


class OneRank:
    """halox.Transpose between two orders of the axes, forward."""

    params = (["64x96x128"], ["021", "102", "120", "201", "210"], ["f4", "c16"])
    param_names = ("cells", "axes", "dtype")
    timeout = 600
    number = 1
    batches = 11

    @classmethod
    def small(cls) -> OneRank:
        tiny = cls()
        tiny.params = (["4x5x6"], ["021", "210"], ["f4"])
        tiny.batches = 1
        return tiny

    def setup_cache(self) -> Figures:
        sizes, axes, dtypes = self.params
        words = ["--device", "cpu", "--repeats", str(self.batches), "--directions", "forward"]
        words += ["--sizes", ",".join(sizes), "--axes", ",".join(axes)]
        found: Figures = {}
        for row in measured("transpose", *words, "--dtype", ",".join(dtypes), limit_s=self.timeout):
            found.setdefault((*_cells_and_axes(row), row["dtype"]), {})[row["name"]] = row
        return found

    def track_transpose(self, measured: Figures, *chosen: str) -> float:
        return float(measured[chosen][SELECTED]["us"])

    track_transpose.unit = "us"  # type: ignore[attr-defined]

    def track_time_over_numpy(self, measured: Figures, *chosen: str) -> float:
        rows = measured[chosen]
        return float(rows[SELECTED]["us"] / rows[COPYTO]["us"])

    track_time_over_numpy.unit = "ratio"  # type: ignore[attr-defined]


class Ranks:
    """Forward transposes of complex128 in slabs and pencils; the slowest rank."""

    params = (["128x128x128"], ["012", "021", "210"], ["slabs", "pencils"], [2, 4])
    param_names = ("cells", "axes", "division", "ranks")
    timeout = 600
    number = 1
    batches = 11

    @classmethod
    def small(cls) -> Ranks:
        tiny = cls()
        tiny.params = (["4x6x8"], ["012", "210"], ["slabs"], [2])
        tiny.batches = 1
        return tiny

    def setup_cache(self) -> Figures:
        sizes, axes, divisions, rank_counts = self.params
        found: Figures = {}
        for ranks in rank_counts:
            words = ["-n", str(ranks), "--device", "cpu", "--repeats", str(self.batches)]
            words += ["--sizes", ",".join(sizes), "--axes", ",".join(axes), "--dtype", "c16"]
            words += ["--divisions", ",".join(divisions), "--directions", "forward"]
            for row in measured("transpose", *words, limit_s=self.timeout):
                key = *_cells_and_axes(row), row["division"], ranks
                found.setdefault(key, {})[row["name"]] = row
        return found

    def track_transpose(self, measured: Figures, *chosen: Any) -> float:
        return float(measured[chosen][SELECTED]["us"])

    track_transpose.unit = "us"  # type: ignore[attr-defined]

    def track_time_over_mpi4py(self, measured: Figures, *chosen: Any) -> float:
        rows = measured[chosen]
        best = min(rows[name]["us"] for name in BY_MPI if name in rows)
        return float(rows[SELECTED]["us"] / best)

    track_time_over_mpi4py.unit = "ratio"  # type: ignore[attr-defined]

    def track_bytes_sent(self, measured: Figures, *chosen: Any) -> int:
        return int(measured[chosen][SELECTED]["bytes_sent"])

    track_bytes_sent.unit = "bytes"  # type: ignore[attr-defined]


def _cells_and_axes(row: dict[str, Any]) -> tuple[str, str]:
    return "x".join(map(str, row["shape"])), "".join(map(str, row["axes"]))
