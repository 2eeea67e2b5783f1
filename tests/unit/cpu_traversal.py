"""Compiles the traversal kernels with g++ and packs with them on the CPU."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np

from halox.datatypes import Datatype
from halox.packing.traversal_plan import TraversalPlan, plan
from halox.packing.traversal_tree import common_word, simplified
from halox.runtime.gpu.compiler import preamble, source
from tests.unit.cpu_kernels import SHIM, shared_library

_RUN = """
extern "C" void run(unsigned grid, unsigned block, int backwards, unsigned shared_bytes, int entry, int unpack,
                    u64 array, u64 packed, const void* table)
{{
    const auto launch = [&](auto kernel, const auto& parameter) {{
        if (shared_bytes > sizeof shared_image)
            fail_on_cpu("too little shared memory");
        launch_with_barriers(grid, block, backwards != 0, shared_image, shared_bytes, kernel, array, packed,
                             parameter);
    }};
    const Table& strides = *(const Table*)table;
    const ListedTable& listed = *(const ListedTable*)table;
    switch (entry) {{
    case 0: launch(unpack ? traversal_unpack_regular : traversal_pack_regular, strides); break;
    case 1: launch(unpack ? traversal_unpack_chain : traversal_pack_chain, listed); break;
    default: launch(unpack ? traversal_unpack : traversal_pack, listed); break;
    }}
}}
{extra}
"""
ENTRIES = ("_regular", "_chain", "")


@cache
def library(defines: tuple[tuple[str, str], ...], extra: str = "") -> ctypes.CDLL:
    """Compile the kernels to a library with a function ``run``, which launches one of them."""
    text = (
        f'{preamble(defines)}#include "{SHIM}"\n{source("traversal")}\n'
        f"thread_local Piece shared_image[4096];\n{_RUN.format(extra=extra)}"
    )
    return shared_library(text)


def aligned_copy(values: np.ndarray) -> np.ndarray:
    """Copy bytes to an address that is a multiple of 16."""
    nbytes = values.nbytes
    memory = np.zeros(nbytes + 16, np.uint8)
    start = -memory.ctypes.data % 16
    memory[start : start + nbytes] = values.reshape(-1).view(np.uint8)
    return memory[start : start + nbytes]


def launch(
    planned: TraversalPlan,
    array: int,
    packed: int,
    *,
    unpack: bool = False,
    backwards: bool = False,
) -> None:
    """Launch a plan's kernel on the CPU."""
    image = aligned_copy(planned.image)
    table = aligned_copy(np.atleast_1d(planned.table(image.ctypes.data)))
    library(planned.defines).run(
        ctypes.c_uint(planned.shape.blocks),
        ctypes.c_uint(planned.shape.threads),
        ctypes.c_int(backwards),
        ctypes.c_uint(planned.copied),
        ctypes.c_int(ENTRIES.index(planned.entry)),
        ctypes.c_int(unpack),
        ctypes.c_uint64(array % 2**64),
        ctypes.c_uint64(packed),
        ctypes.c_void_p(table.ctypes.data),
    )


def move(
    array: int,
    datatype: Datatype,
    count: int,
    packed: int,
    *,
    unpack: bool = False,
    backwards: bool = False,
    flat_blocks: int = 0,
    few_units: int = 0,
    sms: int = 4,
    **options: Any,
) -> TraversalPlan | None:
    """Pack or unpack items between two addresses; returns the plan, or None if the items have no bytes."""
    placed = simplified(datatype, count, flat_blocks=flat_blocks, few_units=few_units)
    if placed is None:
        return None
    offset, tree = placed
    bits = (array + offset) | packed | common_word(tree)
    planned = plan(tree, bits & -bits, sms=sms, **options)
    launch(planned, array + offset, packed, unpack=unpack, backwards=backwards)
    return planned
