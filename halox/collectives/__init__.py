"""Reductions over the ranks: of arrays, and of the owned cells of fields.

`Allreduce` is for users who have no grid. A `Grid` has a `HostReductions` or a `DeviceReductions`, which makes a
reduction in the first call of a signature and keeps it (`prepared`). NCCL and MPI only move bytes. NumPy or kernels
combine the values, in a fixed order, so that every rank gets the same bits in every run.
"""
