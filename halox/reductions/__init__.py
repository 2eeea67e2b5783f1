"""Reductions over the ranks: of arrays, and of the owned cells of fields.

A reduction of fields is a program over the cells of a rank, an operation for each result (`field_operations`), and the
ranks. `HostReduction` and `DeviceReduction` run programs; begin with `host.host_reductions`. A `Grid` makes a reduction
in the first call of a signature and keeps it (`prepared`). `Allreduce` reduces arrays, by one of several `algorithms`,
and needs no grid. NCCL and MPI only move bytes. NumPy or kernels combine the values, in a fixed order, so that every
rank gets the same bits in every run.
"""
