"""Benchmarks of one process: packing, transposes, MILC, and Fourier transforms."""

from __future__ import annotations

from typing import Any, Self

from halox.runtime.gpu.cuda import why_no_gpu

from . import SELECTED, Commanded, Measured, ratio, time_of, track

PACKED = [
    *("vector/8B-1MiB", "vector/128B-1MiB", "vector/4KiB-1MiB", "hypercube/16"),
    *("lower_triangle/1024", "random_indexed/dense-1MiB", "struct_24/65536", "WRF_x_vec/2x2"),
    *("MILC_su3_zdown/16x16x16x16", "NAS_MG_x/258x130x130", "LAMMPS_full/3534-3062"),
    *("SPECFEM3D_cm/c4", "FFT2/1024", "HACC_vblock/4Ki", "face_x/128", "face_y/128"),
]
LARGE = ["vector/128B-64MiB", "lower_triangle/8192", "random_indexed/sparse-64MiB", "face_x/512"]
WHOLE = "whole NumPy arrays"


class HostPacking(Commanded):
    """NumPy arrays, planned once, beside MPI_Pack; bytes of the sectors that must be moved."""

    kind = "pack"
    words = "--device cpu --patterns {case} --direction {direction}"
    params = (PACKED, ["pack", "unpack"])
    few = (["NAS_LU_y/12", "SPECFEM3D_oc/c1"], ["pack", "unpack"])
    param_names = ("case", "direction")
    batches = 11

    def key(self, row: dict[str, Any], ranks: int) -> tuple[Any, ...]:
        return row["case"], row["direction"]

    def setup_cache(self) -> Measured:
        return self.measured()

    track_pack = time_of("host")
    track_time_over_mpi4py = ratio("mpi4py", name="host")
    track_sector_bytes = track("bytes", lambda rows: rows["host"]["sector_bytes"])


class Transposes(Commanded):
    """halox.Transpose between two orders of the axes, forward, beside NumPy."""

    kind = "transpose"
    words = "--device cpu --directions forward --sizes {cells} --axes {axes} --dtype {dtype}"
    params = (["64x96x128"], ["021", "102", "120", "201", "210"], ["f4", "c16"])
    few = (["4x5x6"], ["021", "210"], ["f4"])
    param_names = ("cells", "axes", "dtype")
    batches = 11

    def key(self, row: dict[str, Any], ranks: int) -> tuple[Any, ...]:
        return "x".join(map(str, row["shape"])), row["order"], row["dtype"]

    def setup_cache(self) -> Measured:
        return self.measured()

    track_transpose = time_of()
    track_time_over_numpy = ratio("np.copyto")


class MilcIteration(Commanded):
    """An iteration for one parity of a lattice of sites in double precision, beside whole NumPy arrays."""

    kind = "milc"
    words = "--device cpu --precisions double --lattices {sites} --operators {operator}"
    params = (["8x8x8x8", "16x16x16x16"], ["improved", "naive"])
    few = (["8x8x8x8"], ["naive"])
    param_names = ("sites", "operator")
    batches = 9

    def key(self, row: dict[str, Any], ranks: int) -> tuple[Any, ...]:
        return "x".join(map(str, row["lattice"])), row["operator"]

    def setup_cache(self) -> Measured:
        return self.measured()

    track_gflops = track("GFLOPS", lambda rows: rows["halox"]["cg_gflops"])
    track_time_over_whole_arrays = ratio(WHOLE, name="halox")


if why_no_gpu() is None:

    class DevicePacking(Commanded):
        """CuPy arrays into a packed buffer on the device or in pinned host memory, with warm caches."""

        kind = "pack"
        words = "--no-baselines --patterns {case} --methods {method} --destinations {destination}"
        params = ([*PACKED, *LARGE], ["auto", "workunits", "traversal"], ["device", "host"])
        few = (["NAS_LU_y/12", "face_x/64"], ["auto"], ["device", "host"])
        param_names = ("case", "method", "destination")
        timeout = 1200
        batches = 11

        def key(self, row: dict[str, Any], ranks: int) -> tuple[Any, ...] | None:
            if row["cache"] == "cold" or row["name"] not in self.params[1]:
                return None
            return row["case"], row["name"], row["destination"]

        def setup_cache(self) -> Measured:
            return {
                key: {SELECTED: row}
                for key, rows in self.measured().items()
                for row in rows.values()
            }

        track_pack = time_of()
        track_pack_in_a_graph = track("us", lambda rows: rows[SELECTED]["graph_us"])
        track_share_of_bound = track("share", lambda rows: rows[SELECTED]["of_bound"])

    class FusedSteps:
        """5-point steps of float32 on a periodic block, in graphs: stores from the kernel, beside exchanges."""

        params = ([256, 512, 1024, 2048],)
        param_names = ("cells",)
        timeout = 300

        @classmethod
        def small(cls) -> Self:
            """Return an instance with little to do."""
            tiny = cls()
            tiny.params = ([64],)
            return tiny

        def setup_cache(self) -> dict[int, dict[str, Any]]:
            from halox_bench.fused import measured

            return {cells: measured(cells) for cells in self.params[0]}

        def track_step(self, found: dict[int, dict[str, Any]], cells: int) -> float:
            """Return the microseconds of a fused step."""
            return float(found[cells]["fused_us"])

        def track_time_over_exchange(self, found: dict[int, dict[str, Any]], cells: int) -> float:
            """Return the time of a fused step over the time of a step with an exchange."""
            return float(found[cells]["fused_over_exchange"])
