"""The datatype engine: packers copy the bytes that a datatype describes to contiguous memory, and back.

On the host `HostPacker` packs (`host`). On a GPU there are four packers (`choosing` chooses one): `strided`,
`workunits`, `traversal` and `copy_engine`. `pack` has the public functions; `device` has the launches of the paths.
"""
