"""Distributed fast Fourier transforms of fields: `FFT` and the modules below it."""

from __future__ import annotations

from halox.fft.transform import FFT

__all__ = ["FFT"]
