"""Datatypes: descriptions of the bytes of memory that make up a message.

The constructors have MPI's names, argument orders and rules. A datatype knows its canonical
layout (strided blocks if possible, else a block list), its bounds and its type signature. It
converts to and from mpi4py datatypes. Only these conversions need MPI; nothing here needs a GPU
or an array.
"""

from __future__ import annotations

from halox.datatypes.boxes import slab, subarray
from halox.datatypes.constructors import (
    contiguous,
    dup,
    hindexed,
    hindexed_block,
    hvector,
    indexed,
    indexed_block,
    primitive,
    resized,
    struct,
    vector,
)
from halox.datatypes.datatype import Datatype
from halox.datatypes.layout import BlockList, Layout, StridedBlocks
from halox.datatypes.mpi import from_mpi
from halox.datatypes.numpy_types import TypeLike, as_datatype
from halox.datatypes.signature import Signature

__all__ = [
    "BlockList",
    "Datatype",
    "Layout",
    "Signature",
    "StridedBlocks",
    "TypeLike",
    "as_datatype",
    "contiguous",
    "dup",
    "from_mpi",
    "hindexed",
    "hindexed_block",
    "hvector",
    "indexed",
    "indexed_block",
    "primitive",
    "resized",
    "slab",
    "struct",
    "subarray",
    "vector",
]
