"""``halox bench allreduce``: reductions over all ranks."""
