"""Benchmarks of NumPy arrays in one process: packing, transposes, Fourier transforms, reductions, calls."""

from __future__ import annotations

from . import Measured, Rows, ratio, us_of

PACKED = [
    *("vector/128B-1MiB", "lower_triangle/1024", "random_indexed/dense-1MiB", "struct_24/65536"),
    *("WRF_x_vec/2x2", "NAS_MG_x/258x130x130", "LAMMPS_full/3534-3062", "matrix/1024x1024-f4"),
]


class HostPacking(Rows):
    """NumPy arrays, planned once, beside MPI_Pack and MPI_Unpack."""

    command = "pack --device cpu --patterns {case} --direction {direction}"
    case = "{case} {direction}"
    params = (PACKED, ["pack", "unpack"])
    few = (["NAS_LU_y/12", "SPECFEM3D_oc/c1", "WRF_y_vec/8x8"], ["pack", "unpack"])
    param_names = ("case", "direction")

    def setup_cache(self) -> Measured:
        return self.measured()

    track_pack = us_of()
    track_ratio_to_mpi4py = ratio("MPI_Pack")


class Transposes(Rows):
    """halox.Transpose between two orders of the axes, forward, beside NumPy."""

    command = (
        "transpose --device cpu --directions forward --sizes {cells} --axes {axes} --dtype c16"
    )
    case = "{cells} c16 axes {axes} forward"
    params = (["64x96x128"], ["021", "102", "120", "201", "210"])
    few = (["4x5x6"], ["021", "210"])
    param_names = ("cells", "axes")

    def setup_cache(self) -> Measured:
        return self.measured()

    track_transpose = us_of()
    track_ratio_to_numpy = ratio("np.copyto")


class FourierTransforms(Rows):
    """Forward transforms of N^3 complex128 values, beside SciPy or NumPy."""

    command = "fft --device cpu --cells {N}"
    case = "{N}^3 c16"
    params = ([32, 64, 128],)
    few = ([16],)
    param_names = ("N",)

    def setup_cache(self) -> Measured:
        return self.measured()

    track_forward = us_of()
    track_ratio_to_whole_array = ratio("one plan over all axes")


class Reductions(Rows):
    """The norm of a field of N^3 float64 cells, beside a copy of it."""

    command = "reductions --device cpu --of fields --cells {N}"
    case = "{N}^3 f8"
    params = ([64, 128],)
    few = ([8],)
    param_names = ("N",)

    def setup_cache(self) -> Measured:
        return self.measured()

    track_norm = us_of()
    track_ratio_to_copy = ratio("copy of the field")


class Calls(Rows):
    """The host's time of cached calls, of an exchange with 26 periodic neighbours and of `halox.pack` of 64 KiB."""

    command = "calls --device cpu --of {call}"
    case = "{call}"
    params = (["exchange", "pack"],)
    few = params
    param_names = ("call",)

    def setup_cache(self) -> Measured:
        return self.measured()

    track_call = us_of()
