"""Packing by datatype: NumPy arrays beside MPI_Pack and slicing, and CuPy arrays where there is a GPU."""

from __future__ import annotations

from typing import Any

from halox.runtime.gpu.cuda import why_no_gpu
from halox_bench.pack.cases import select
from halox_bench.pack.options import Options
from halox_bench.pack.rows import Row

CASES = [
    "vector/8B-1MiB",
    "vector/128B-1MiB",
    "vector/4KiB-1MiB",
    "hypercube/16",
    "lower_triangle/1024",
    "random_indexed/dense-1MiB",
    "struct_24/65536",
    "WRF_x_vec/2x2",
    "MILC_su3_zdown/16x16x16x16",
    "NAS_MG_x/258x130x130",
    "LAMMPS_full/3534-3062",
    "SPECFEM3D_cm/c4",
    "FFT2/1024",
    "HACC_vblock/4Ki",
    "face_x/128",
    "face_y/128",
]
LARGE = ["vector/128B-64MiB", "lower_triangle/8192", "random_indexed/sparse-64MiB", "face_x/512"]


class HostPacking:
    """NumPy arrays, planned once."""

    params = (CASES, ["pack", "unpack"])
    param_names = ("case", "direction")
    timeout = 600
    repeats = 11

    @classmethod
    def small(cls) -> HostPacking:
        tiny = cls()
        tiny.params = (["NAS_LU_y/12", "SPECFEM3D_oc/c1"], ["pack", "unpack"])
        tiny.repeats = 3
        return tiny

    def setup_cache(self) -> dict[tuple[str, str], dict[str, float]]:
        """Measure everything once; microseconds by method."""
        from halox_bench.pack import on_host

        cases, directions = self.params
        options = Options(directions=tuple(directions), repeats=self.repeats)
        rows = list(on_host.run(select(cases), options, str.strip))
        return {(c, d): _times(rows, c, d) for c in cases for d in directions}

    def track_pack(self, measured: Any, case: str, direction: str) -> float:
        return float(measured[case, direction]["host"])

    track_pack.unit = "us"  # type: ignore[attr-defined]

    def track_time_over_mpi4py(self, measured: Any, case: str, direction: str) -> float:
        times = measured[case, direction]
        return float(times["host"] / times["mpi4py"])

    track_time_over_mpi4py.unit = "ratio"  # type: ignore[attr-defined]


class Catalogue:
    """Bytes that must be moved, independently of the packer."""

    params = ([*CASES, *LARGE],)
    param_names = ("case",)

    def track_sector_bytes(self, case: str) -> int:
        from halox_bench.pack.sectors import SECTOR, sectors

        (found,) = select([case])
        datatype, start = found.place(0)
        return SECTOR * sectors(datatype, found.count, start)

    track_sector_bytes.unit = "bytes"  # type: ignore[attr-defined]


if why_no_gpu() is None:

    class DevicePacking:
        """CuPy arrays into a packed buffer on the device or in pinned host memory."""

        params = ([*CASES, *LARGE], ["auto", "workunits", "traversal"], ["device", "host"])
        param_names = ("case", "method", "destination")
        timeout = 1200

        @classmethod
        def small(cls) -> DevicePacking:
            tiny = cls()
            tiny.params = (["NAS_LU_y/12", "face_x/64"], ["auto"], ["device", "host"])
            return tiny

        def setup_cache(self) -> dict[tuple[str, str, str], dict[str, float | None]]:
            """Measure everything once, with the caches as warm as the data let them be."""
            from halox_bench.common.rig import Rig
            from halox_bench.pack import on_device

            cases, methods, destinations = self.params
            options = Options(
                methods=tuple(methods), destinations=tuple(destinations), baselines=False
            )
            rows = on_device.run(Rig(), select(cases), options, str.strip)
            return {
                (f"{row.pattern}/{row.size}", row.method, row.destination): {
                    "us": row.us,
                    "graph_us": row.graph_us,
                    "of_bound": row.of_bound,
                }
                for row in rows
                if row.cache != "cold"
            }

        def track_pack(self, measured: Any, *chosen: str) -> float:
            return _number(measured[chosen]["us"])

        track_pack.unit = "us"  # type: ignore[attr-defined]

        def track_pack_in_a_graph(self, measured: Any, *chosen: str) -> float:
            return _number(measured[chosen]["graph_us"])

        track_pack_in_a_graph.unit = "us"  # type: ignore[attr-defined]

        def track_share_of_bound(self, measured: Any, *chosen: str) -> float:
            return _number(measured[chosen]["of_bound"])

        track_share_of_bound.unit = "share"  # type: ignore[attr-defined]


def _times(rows: list[Row], case: str, direction: str) -> dict[str, float]:
    return {
        row.method: row.us
        for row in rows
        if f"{row.pattern}/{row.size}" == case and row.direction == direction and row.us
    }


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
