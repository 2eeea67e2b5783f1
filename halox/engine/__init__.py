"""The datatype engine: memory, kernels and packers on host and device."""
