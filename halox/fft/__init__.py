"""Distributed transposes and fast Fourier transforms of fields.

`Transpose` copies a field between two divisions of a grid. An `FFT` transforms whole axes on each rank and transposes
between them: `stages` finds the divisions, `pipeline` runs them, by cuFFT or NumPy (`cufft`, `host_fft`). Both are for
users, and work on two grids. Begin with `transform`.
"""

from __future__ import annotations

from halox.fft.transform import FFT

__all__ = ["FFT"]
