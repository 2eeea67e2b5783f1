"""Whole arrays: gathered on one rank, scattered from it, and kept in files.

`gather_scatter` has `Grid.gather` and `Grid.scatter`. The package `checkpoint` writes and reads files, on all ranks.
Both cut a field by `regions`, send through a `message_queue` that bounds the memory in flight, and move the cells of a
GPU through page-locked memory (`halox.runtime.gpu.staging`). Begin with `gather_scatter`.
"""
