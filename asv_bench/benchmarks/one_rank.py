"""Benchmarks of one process: packing, transposes, Fourier transforms; on a machine with a GPU also of CuPy arrays."""

from __future__ import annotations

from halox.runtime.gpu.cuda import why_no_gpu

from . import Measured, Rows, ratio, us_of

PACKED = [
    *("vector/8B-1MiB", "vector/128B-1MiB", "vector/4KiB-1MiB", "hypercube/16"),
    *("lower_triangle/1024", "random_indexed/dense-1MiB", "struct_24/65536", "WRF_x_vec/2x2"),
    *("MILC_su3_zdown/16x16x16x16", "NAS_MG_x/258x130x130", "LAMMPS_full/3534-3062"),
    *("SPECFEM3D_cm/c4", "FFT2/1024", "HACC_vblock/4Ki", "face_x/128", "matrix/1024x1024-f4"),
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
        "transpose --device cpu --directions forward --sizes {cells} --axes {axes} --dtype {dtype}"
    )
    case = "{cells} {dtype} axes {axes} forward"
    params = (["64x96x128"], ["021", "102", "120", "201", "210"], ["f4", "c16"])
    few = (["4x5x6"], ["021", "210"], ["f4"])
    param_names = ("cells", "axes", "dtype")

    def setup_cache(self) -> Measured:
        return self.measured()

    track_transpose = us_of()
    track_ratio_to_numpy = ratio("np.copyto")


class FourierTransforms(Rows):
    """Forward transforms of N^3 complex128 values, beside SciPy or NumPy."""

    command = "fft --device cpu --cells {N}"
    case = "{N}^3 c16"
    params = ([16, 32, 64, 128],)
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


if why_no_gpu() is None:

    class DevicePacking(Rows):
        """CuPy arrays into a packed buffer on the device, with warm caches, beside kernels by hand."""

        command = "pack --device gpu --patterns {case} --direction {direction}"
        case = "{case} {direction}"
        params = ([*PACKED, "vector/128B-64MiB", "lower_triangle/8192", "face_x/512"], ["pack"])
        few = (["NAS_LU_y/12", "face_x/64"], ["pack", "unpack"])
        param_names = ("case", "direction")

        def setup_cache(self) -> Measured:
            return self.measured()

        track_pack = us_of()
        track_ratio_to_copy = ratio("copy of the same bytes")

    class FusedSteps(Rows):
        """5-point steps of float32 on a periodic block, in graphs: stores from the kernel, beside exchanges."""

        command = "steps --stencils fused --cells {cells}"
        case = "fused {cells}^2"
        params = ([256, 512, 1024, 2048],)
        few = ([64],)
        param_names = ("cells",)

        def setup_cache(self) -> Measured:
            return self.measured()

        track_step = us_of()
        track_ratio_to_exchange = ratio("stencil and exchange")
