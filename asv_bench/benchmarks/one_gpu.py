"""Benchmarks of CuPy arrays in one process, on a machine with a GPU."""

from __future__ import annotations

from halox.runtime.gpu.cuda import why_no_gpu

from . import Measured, Rows, ratio, us_of

if why_no_gpu() is None:

    class DevicePacking(Rows):
        """CuPy arrays into a packed buffer on the device, with warm caches, beside kernels by hand."""

        command = "pack --device gpu --patterns {case}"
        case = "{case} pack"
        params = (["vector/128B-64MiB", "lower_triangle/8192", "face_x/512", "WRF_x_vec/2x2"],)
        few = (["NAS_LU_y/12", "face_x/64"],)
        param_names = ("case",)

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
