"""Plans for the kernels that reduce over ranks: chunks, launch shapes, and offsets of all data in the ranks' memory.

This module touches no GPU. The parameters have the layout of the C structs in ``kernels/allreduce_body.cu`` and
``kernels/allreduce_field.cu``; a test compares them. Ranks whose kernels synchronize must have equal plans, so that
plans depend on no property that differs between the GPUs of a node, except for the rank-local part of a field
reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from halox.errors import FieldError
from halox.paths.peer.table import TILE_BYTES, TILE_DATA_BYTES
from halox.reductions.operations import Operation, element, find_operation
from halox.runtime.arrays import Array, DType
from halox.values import rounded_up

MOST_RANKS = 16
"""Most ranks of a kernel, as in ``allreduce_body.cu``."""

EPOCH_SHIFT = 20
"""Shift of the epoch in a state, as in ``allreduce_body.cu``: a launch has fewer than 2**EPOCH_SHIFT turns."""

THREADS = 256
"""Threads of a block; fewer if there is less work."""

LEAST_THREADS = 32
"""Least threads of a block: at least one thread per rank, since one thread waits for each rank."""

WIDE_BYTES = 1 << 13
"""Bytes of an array from which packets are LL128-like: fewer threads move more bytes each, and fewer bytes are sent."""

WIDE_THREADS, WIDE_BLOCKS = 64, 512
"""Threads of a block with LL128-like packets, and most blocks."""

BLOCKS = 256
"""Most blocks that exchange: further blocks would only wait. The same on all ranks, since it determines the chunks."""

KNOWN_RANKS = 8
"""Most ranks for which packets have a separate kernel for each number of ranks, with unrolled loops over the ranks."""

PART_BYTES = (2048, 65536)
"""Least and most bytes of a rank's part of a chunk; more only if there would be more than MOST_CHUNKS chunks."""

MOST_CHUNKS = 1 << 16
"""Most chunks of an array."""

_ALIGNMENT = 256
_SHARED = ("ranks", "elements", "chunks", "chunk_elements", "rank_bytes", "slot_bytes")

ALLREDUCE = np.dtype(
    [
        ("state", "u8"),
        ("failure", "u8"),
        ("limit_ns", "u8"),
        ("slot_bytes", "u8"),
        ("rank_bytes", "u8"),
        ("flags", "u8"),
        ("source", "u8"),
        ("target", "u8"),
        ("elements", "u8"),
        ("rank", "u4"),
        ("ranks", "u4"),
        ("chunks", "u4"),
        ("chunk_elements", "u4"),
        ("memory", "u8", (MOST_RANKS,)),
    ]
)
"""Parameter of all kernels, as in ``allreduce_body.cu``."""


@dataclass(frozen=True)
class ReductionPlan:
    """Plan of a reduction by a kernel, without addresses."""

    name: str  # of the call, for errors
    function: str  # name of the .cu file, and of the kernel in it
    defines: tuple[tuple[str, str], ...]  # preprocessor definitions for the kernel
    ranks: int
    elements: int  # of the array; 1 for a field reduction
    chunks: int  # divided among the blocks
    chunk_elements: int  # of a rank's part of a chunk, or of a chunk without parts
    threads: int
    blocks: int
    rank_bytes: int  # bytes of a rank's part of a slot
    slot_bytes: int
    flag_bytes: int = 0  # of the flags behind the slots
    partial_bytes: int = 0  # of the blocks' results, which no other rank reads
    slots: int = 2

    @property
    def flags_offset(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def state_offset(self) -> int:
        """Offset of this rank's state, behind the memory that peers write."""
        return rounded_up(self.flags_offset + self.flag_bytes, _ALIGNMENT)

    @property
    def partials_offset(self) -> int:
        """Offset of the blocks' results."""
        return self.state_offset + _ALIGNMENT

    @property
    def memory_bytes(self) -> int:
        return self.partials_offset + rounded_up(self.partial_bytes, _ALIGNMENT)

    def parameter(self, rank: int, memory: Sequence[int], failure: int, limit_ns: int) -> Array:
        """Return the kernel's parameter without ``source`` and ``target``, shape (1,) of ALLREDUCE."""
        parameters = np.zeros(1, ALLREDUCE)
        entry = parameters[0]
        entry["state"] = memory[rank] + self.state_offset
        entry["failure"], entry["limit_ns"] = failure, limit_ns
        entry["flags"] = self.flags_offset
        entry["rank"] = rank
        for name in _SHARED:
            entry[name] = getattr(self, name)
        entry["memory"][: self.ranks] = memory
        return parameters


def plan_oneshot(dtype: DType, op: str, elements: int, ranks: int) -> ReductionPlan:
    """Plan the reduction of a small array: every rank sends its array to all ranks, in packets.

    Not collective; touches no device. Takes ``2 * ranks`` times the packets' bytes in device memory. Packets are twice
    as long as the array; from WIDE_BYTES on they are LL128-like.

    Examples
    --------
    >>> plan = plan_oneshot(np.dtype("f8"), "sum", 1000, 8)
    >>> plan.threads, plan.chunks, plan.blocks, plan.slot_bytes
    (256, 4, 4, 131072)
    """
    if elements * dtype.itemsize >= WIDE_BYTES and dtype.itemsize <= 8:
        return plan_wide(dtype, op, elements, ranks)
    operation = check_operation(dtype, op, ranks)
    each = max(1, 8 // dtype.itemsize)
    units = -(-elements // each)
    threads = block_threads(units)
    chunks = -(-units // threads)
    _check_chunks(chunks, elements, MOST_CHUNKS * threads * each)
    rank_bytes = chunks * threads * (32 if dtype.itemsize == 16 else 16)
    cut = ranks, elements, chunks, threads
    launch = threads, min(chunks, BLOCKS)
    defines = _defines(dtype, operation, ranks)
    memory = rank_bytes, ranks * rank_bytes
    return ReductionPlan(_name(op), "allreduce_oneshot", defines, *cut, *launch, *memory)


def plan_wide(dtype: DType, op: str, elements: int, ranks: int) -> ReductionPlan:
    """Plan the reduction of a medium array: every rank sends its array to all ranks, in LL128-like packets.

    Its caller :func:`plan_oneshot` has the parameters, errors and notes. Elements have at most 8 bytes; packets are 8/7
    as long as the array.

    Examples
    --------
    >>> plan = plan_wide(np.dtype("f8"), "sum", 1 << 17, 2)
    >>> plan.threads, plan.chunks, plan.blocks
    (64, 293, 293)
    """
    operation = check_operation(dtype, op, ranks)
    warps = WIDE_THREADS // 32
    tiles = -(-elements * dtype.itemsize // TILE_DATA_BYTES)
    chunks = max(1, -(-tiles // warps))
    _check_chunks(chunks, elements, MOST_CHUNKS * warps * TILE_DATA_BYTES // dtype.itemsize)
    rank_bytes = chunks * warps * TILE_BYTES
    cut = ranks, elements, chunks, warps * TILE_DATA_BYTES // dtype.itemsize
    launch = WIDE_THREADS, min(chunks, WIDE_BLOCKS)
    defines = _defines(dtype, operation, ranks)
    memory = rank_bytes, ranks * rank_bytes
    return ReductionPlan(_name(op), "allreduce_wide", defines, *cut, *launch, *memory)


def _check_chunks(chunks: int, elements: int, most: int) -> None:
    if chunks > MOST_CHUNKS:
        raise FieldError(
            f"{elements} elements are too many for packets, at most {most} are not; reduce by "
            "'reduce_scatter_allgather'"
        )


def plan_scattered(dtype: DType, op: str, elements: int, ranks: int) -> ReductionPlan:
    """Plan the reduction of a large array: each rank combines a part, and all ranks gather the parts.

    Parameters, errors and notes are the same as for :func:`plan_oneshot`. Takes twice the array in device memory.

    Examples
    --------
    >>> plan = plan_scattered(np.dtype("f8"), "sum", 1 << 20, 2)
    >>> plan.chunk_elements, plan.chunks, plan.blocks
    (2048, 256, 256)
    """
    operation = check_operation(dtype, op, ranks)
    nbytes = elements * dtype.itemsize
    wanted = min(max(-(-nbytes // (ranks * BLOCKS)), PART_BYTES[0]), PART_BYTES[1])
    wanted = max(wanted, -(-nbytes // (ranks * MOST_CHUNKS)))
    part_bytes = 1 << (wanted - 1).bit_length()  # a multiple of 16, so that all parts are aligned
    chunk_elements = part_bytes // dtype.itemsize
    chunks = -(-elements // (chunk_elements * ranks))
    rank_bytes = chunks * part_bytes
    cut = ranks, elements, chunks, chunk_elements
    launch = THREADS, min(chunks, BLOCKS)
    memory = rank_bytes, 2 * ranks * rank_bytes, 2 * ranks * chunks * 4
    defines = _defines(dtype, operation)
    function = "allreduce_scattered"
    return ReductionPlan(_name(op), function, defines, *cut, *launch, *memory, slots=1)


def check_operation(dtype: DType, op: str, ranks: int) -> Operation:
    """Return an operation that a kernel supports for a dtype and for ``ranks`` ranks."""
    if ranks > MOST_RANKS:
        raise FieldError(f"{ranks} ranks are more than the {MOST_RANKS} that a kernel serves")
    return find_operation(op, dtype)


def block_threads(units: int) -> int:
    """Return the threads of a block, a power of two."""
    return min(THREADS, max(LEAST_THREADS, 1 << (units - 1).bit_length() if units else 1))


def _name(op: str) -> str:
    return f"allreduce, op={op!r}"


def _defines(dtype: DType, operation: Operation, ranks: int = 0) -> tuple[tuple[str, str], ...]:
    return (
        ("RANKS", str(ranks if ranks <= KNOWN_RANKS else 0)),
        ("ELEMENT", element(dtype)),
        ("ELEMENT_BYTES", str(dtype.itemsize)),
        ("OP", operation.kernel_name),
        ("MAX_THREADS", str(THREADS)),
    )
