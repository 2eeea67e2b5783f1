"""Benchmarks of NumPy arrays between ranks on CPU cores, beside mpi4py."""

from __future__ import annotations

from typing import Any

from . import SELECTED, Commanded, Measured, ratio, time_of, track

MPI_TYPES = "mpi4py types"
MPI_PACK, HALOX_PACK = "MPI_Pack + mpi4py", "halox.pack + mpi4py"
BY_HAND = "pack by hand + mpi4py"
BY_MPI = ("mpi4py Alltoallw", "mpi4py Alltoallw + np.copyto")


class Faces(Commanded):
    """Both faces normal to one axis of an N^3 float64 block, periodic, halo 1; the slowest rank."""

    kind = "exchange"
    words = "--device cpu --sizes {N} --faces {faces}"
    params = ([64, 128], [2, 4], ["x", "z", "all"])
    few = ([8], [2], ["x", "all"])
    param_names = ("N", "ranks", "faces")

    def key(self, row: dict[str, Any], ranks: int) -> tuple[Any, ...]:
        return row["shape"][0], ranks, row["faces"]

    def setup_cache(self) -> Measured:
        return self.measured()

    track_exchange = time_of()
    track_time_over_mpi4py = ratio("mpi4py types, Isend/Irecv")
    track_bytes_sent = track("bytes", lambda rows: rows[SELECTED]["bytes_each_way"])


class Sums(Commanded):
    """Sums of float64 arrays; the slowest rank."""

    kind = "allreduce"
    words = "--device cpu --dtype f8 --sizes {bytes}"
    params = ([8, 8 << 10, 1 << 20, 16 << 20], [2, 4])
    few = ([8, 1000], [2])
    param_names = ("bytes", "ranks")

    def key(self, row: dict[str, Any], ranks: int) -> tuple[Any, ...]:
        return row["nbytes"], ranks

    def setup_cache(self) -> Measured:
        return self.measured()

    track_allreduce = time_of()
    track_set_up = track("us", lambda rows: rows[SELECTED]["setup_us"])
    track_time_over_mpi4py = ratio("MPI_Allreduce")


class Transposes(Commanded):
    """Forward transposes of complex128 in slabs and pencils; the slowest rank."""

    kind = "transpose"
    words = (
        "--device cpu --sizes {cells} --axes {axes} --dtype c16 --divisions {division} "
        "--directions forward"
    )
    params = (["128x128x128"], ["012", "021", "210"], ["slabs", "pencils"], [2, 4])
    few = (["4x6x8"], ["012", "210"], ["slabs"], [2])
    param_names = ("cells", "axes", "division", "ranks")
    batches = 11

    def key(self, row: dict[str, Any], ranks: int) -> tuple[Any, ...]:
        return "x".join(map(str, row["shape"])), row["order"], row["division"], ranks

    def setup_cache(self) -> Measured:
        return self.measured()

    track_transpose = time_of()
    track_time_over_mpi4py = ratio(*BY_MPI)
    track_bytes_sent = track("bytes", lambda rows: rows[SELECTED]["bytes_sent"])


class PingPong(Commanded):
    """Typed messages there and back between two ranks; half a round trip."""

    kind = "pingpong"
    words = "--where host --sizes {N} --patterns {pattern}"
    params = ([256, 1024], ["vector", "triangle", "vector-contiguous", "transpose"])
    few = ([16], ["vector", "transpose"])
    param_names = ("N", "pattern")
    ranks = 2

    def key(self, row: dict[str, Any], ranks: int) -> tuple[Any, ...]:
        return row["n"], row["pattern"]

    def setup_cache(self) -> Measured:
        return self.measured()

    track_half_trip = time_of()
    track_time_over_mpi4py = ratio(MPI_TYPES)


class DdtBench(Commanded):
    """DDTBench's patterns there and back between two ranks; half a round trip."""

    kind = "ddtbench"
    words = "--where host --patterns {pattern}"
    params = (
        [
            *("WRF_x_vec/2x2", "WRF_y_sa/2x2", "MILC_su3_zdown/16x16x16x16", "NAS_LU_y/1020"),
            *(
                "NAS_MG_x/258x130x130",
                "LAMMPS_full/3534-3062",
                "SPECFEM3D_cm/c4",
                "SPECFEM3D_mt/c1",
            ),
            "FFT2/512",
        ],
    )
    few = (["NAS_LU_y/12", "SPECFEM3D_oc/c1"],)
    param_names = ("pattern",)
    ranks = 2

    def key(self, row: dict[str, Any], ranks: int) -> tuple[Any, ...]:
        return (row["case"],)

    def setup_cache(self) -> Measured:
        return self.measured()

    track_half_trip = time_of()
    track_time_over_mpi4py = ratio(MPI_TYPES)
    track_packing_over_mpi_pack = track(
        "ratio", lambda rows: rows[HALOX_PACK]["pack_us"] / rows[MPI_PACK]["pack_us"]
    )


class ScatterGather(Commanded):
    """Strided messages there and back between two ranks, beside packing by hand; half a round trip."""

    kind = "scatter_gather"
    words = "--where host --patterns {pattern}"
    params = (
        [
            *("vector-1KiB/64", "vector-4KiB/64", "stencil-y/128^3", "NAS_MG_y/1024x66x66"),
            *("MILC_su3_zdown/16x32x32x32", "SPECFEM3D_mt/1024x2x64"),
        ],
    )
    few = (["vector-1KiB/16", "SPECFEM3D_mt/1024x2x32"],)
    param_names = ("pattern",)
    ranks = 2

    def key(self, row: dict[str, Any], ranks: int) -> tuple[Any, ...]:
        return (row["case"],)

    def setup_cache(self) -> Measured:
        return self.measured()

    track_half_trip = time_of()
    track_time_over_packing_by_hand = ratio(BY_HAND)
    track_keys_of_an_adapter = track("keys", lambda rows: rows[SELECTED]["adapter_keys"])


class Checkpoints(Commanded):
    """`Grid.save` and `Grid.load` of float64 cells beside plain writes and reads; the slowest rank."""

    kind = "checkpoint"
    words = "--device cpu --cells {cells}"
    params = (["256x256x256"], [1, 4])
    few = (["8x8x8"], [2])
    param_names = ("cells", "ranks")
    batches = 5

    def key(self, row: dict[str, Any], ranks: int) -> tuple[Any, ...]:
        return row["case"], ranks

    def setup_cache(self) -> Measured:
        return self.measured()

    track_save_over_write = track("ratio", lambda rows: rows["grid.save"]["ratio"])
    track_load_over_read = track("ratio", lambda rows: rows["grid.load"]["ratio"])
