"""The datatype engine: packers copy the bytes that a datatype describes to contiguous memory, and back.

On the host `HostPacker` packs (`host`): NumPy, tile by tile where axes are permuted, or MPI where it is faster. On a
GPU there are four packers (`choosing` chooses one): `strided` for faces and other boxes, `workunits` (Wu et al. 2016)
and `traversal` (Jenkins et al. 2013) for all datatypes, and `copy_engine`. The first three plan on the host, with
integers only (`strided_plan`, `workunits_plan`, `traversal_plan`), and their kernels also compile as C++.

`pack` has the public functions; `device` has the launches of the data paths. Begin with `strided_plan`.
"""
