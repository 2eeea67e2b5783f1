"""MILC's conjugate gradient on one CPU core, beside the same arithmetic on whole NumPy arrays."""

from __future__ import annotations

from typing import Any

from .exchange import SELECTED, measured

WHOLE = "whole NumPy arrays"


class Iteration:
    """An iteration for one parity of a lattice of L^4 sites, in double precision."""

    params = ([8, 16], ["improved", "naive"])
    param_names = ("L", "operator")
    timeout = 600
    number = 1
    batches = 9

    @classmethod
    def small(cls) -> Iteration:
        tiny = cls()
        tiny.params = ([8], ["naive"])
        tiny.batches = 1
        return tiny

    def setup_cache(self) -> dict[tuple[int, str], dict[str, dict[str, Any]]]:
        sizes, operators = self.params
        words = ["--device", "cpu", "--precisions", "double", "--repeats", str(self.batches)]
        words += ["--lattices", ",".join("x".join([str(n)] * 4) for n in sizes)]
        found: dict[tuple[int, str], dict[str, dict[str, Any]]] = {}
        for row in measured("milc", *words, "--operators", ",".join(operators), limit_s=600):
            of_case = found.setdefault((row["lattice"][0], row["operator"]), {})
            of_case[SELECTED if row["kind"] == SELECTED else row["name"]] = row
        return found

    def track_gflops(self, measured: Any, n: int, operator: str) -> float:
        return float(measured[n, operator][SELECTED]["cg_gflops"])

    track_gflops.unit = "GFLOPS"  # type: ignore[attr-defined]

    def track_time_over_whole_arrays(self, measured: Any, n: int, operator: str) -> float:
        rows = measured[n, operator]
        return float(rows[SELECTED]["us"] / rows[WHOLE]["us"])

    track_time_over_whole_arrays.unit = "ratio"  # type: ignore[attr-defined]
