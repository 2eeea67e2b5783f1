"""Reductions of NumPy arrays; begin with `host_reductions`.

`host_programs` computes the values of a rank's cells, blockwise in cache (`cell_sums`, `exact_sums`). `host_allreduce`
combines the values of all ranks, in shared memory (`shared_reduction`) or by MPI (`mpi_reduction`).
"""
