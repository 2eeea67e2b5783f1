"""Benchmarks of NumPy arrays between ranks on CPU cores, beside mpi4py; times are the slowest rank's."""

from __future__ import annotations

from . import Measured, Rows, detail, ratio, us_of

MPI_TYPES = "mpi4py types"


class Faces(Rows):
    """Both faces normal to one axis of an N^3 float64 block, or all neighbours; periodic, halo 1."""

    command = "exchange --device cpu --sizes {N} --faces {faces} --paths="
    case = "{N}^3 f8 {faces}"
    params = ([64, 128], ["x", "z", "all"])
    few = ([8], ["x", "all"])
    param_names = ("N", "faces")
    ranks = 2

    def setup_cache(self) -> Measured:
        return self.measured()

    track_exchange = us_of()
    track_ratio_to_mpi4py = ratio("mpi4py types, Isend/Irecv")
    track_bytes_sent = detail("bytes", "bytes_each_way")


class Sums(Rows):
    """Sums of float64 arrays."""

    command = "allreduce --device cpu --dtype f8 --sizes {size} --algorithms="
    case = "{size} f8 sum"
    params = (["8B", "8KiB", "1MiB", "16MiB"],)
    few = (["8B", "1KiB"],)
    param_names = ("size",)
    ranks = 2

    def setup_cache(self) -> Measured:
        return self.measured()

    track_allreduce = us_of()
    track_set_up = detail("us", "setup_us")
    track_ratio_to_mpi4py = ratio("MPI_Allreduce")


class Transposes(Rows):
    """Forward transposes of complex128 in slabs and pencils."""

    command = (
        "transpose --device cpu --sizes {cells} --axes {axes} --dtype c16 --divisions {division} "
        "--directions forward --paths="
    )
    case = "{cells} c16 axes {axes} {division} forward"
    params = (["128x128x128"], ["012", "021", "210"], ["slabs", "pencils"])
    few = (["4x6x8"], ["012", "210"], ["slabs"])
    param_names = ("cells", "axes", "division")
    ranks = 4

    def setup_cache(self) -> Measured:
        return self.measured()

    track_transpose = us_of()
    track_ratio_to_mpi4py = ratio("mpi4py Alltoallw")
    track_bytes_sent = detail("bytes", "bytes_sent")


class DdtBench(Rows):
    """DDTBench's patterns there and back between two ranks; half a round trip."""

    command = "ddtbench --device cpu --patterns {pattern} --paths="
    case = "{pattern}"
    params = (
        [
            *("WRF_x_vec/2x2", "MILC_su3_zdown/16x16x16x16", "NAS_LU_y/1020", "FFT2/512"),
            *("NAS_MG_x/258x130x130", "LAMMPS_full/3534-3062", "SPECFEM3D_cm/c4"),
        ],
    )
    few = (["NAS_LU_y/12", "SPECFEM3D_oc/c1", "FFT2/256"],)
    param_names = ("pattern",)
    ranks = 2

    def setup_cache(self) -> Measured:
        return self.measured()

    track_half_trip = us_of()
    track_ratio_to_mpi4py = ratio(MPI_TYPES)


class Strided(Rows):
    """Strided messages there and back between two ranks; half a round trip."""

    command = "scatter_gather --device cpu --patterns {pattern} --paths="
    case = "{pattern}"
    params = (
        ["vector-1KiB/64", "vector-4KiB/64", "arrays-4KiB/one-way", "arrays-64KiB/both-ways"],
    )
    few = (["vector-1KiB/16", "arrays-64KiB/both-ways"],)
    param_names = ("pattern",)
    ranks = 2

    def setup_cache(self) -> Measured:
        return self.measured()

    track_half_trip = us_of()
    track_ratio_to_mpi4py = ratio(MPI_TYPES)


class Checkpoints(Rows):
    """`Grid.save` and `Grid.load` of float64 cells beside plain writes and reads."""

    command = "checkpoint --device cpu --cells {cells}"
    case = "{cells}"
    params = (["128x256x256"],)
    few = (["8x8x8"],)
    param_names = ("cells",)
    ranks = 2
    batches = 5

    def setup_cache(self) -> Measured:
        return self.measured()

    track_ratio_to_write = ratio("os.write, fsync", "grid.save")
    track_ratio_to_read = ratio("os.read", "grid.load")
