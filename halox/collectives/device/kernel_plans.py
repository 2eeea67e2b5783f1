"""Plans for the kernels that reduce over ranks: chunks, launch shapes, and places of everything in the ranks' memory.

No GPU is touched here. The parameters' layout is that of the C structs in ``kernels/allreduce_body.cu`` and
``kernels/allreduce_field.cu``; a test holds one against the other. Ranks whose kernels meet must plan alike, so plans
depend on nothing that differs between the GPUs of a node, but for a field's local part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from halox.collectives.operations import ELEMENTS, Operation, find_operation, wide_dtype
from halox.errors import FieldError
from halox.packing.refine import Level
from halox.packing.strided_plan import MAX_LEVELS, MAX_WORDS, Row
from halox.paths.peer.table import TILE_BYTES, TILE_DATA_BYTES
from halox.runtime.arrays import Described

MOST_RANKS = 16
"""Ranks of a kernel, as in ``allreduce_body.cu``."""

EPOCH_SHIFT = 20
"""Shift of the epoch in a state, as there: a launch has fewer than 2**EPOCH_SHIFT turns."""

THREADS = 256
"""Threads of a block; fewer where there is less for them to do."""

LEAST_THREADS = 32
"""No fewer than ranks, since a thread each hears from them."""

WIDE_BYTES = 1 << 13
"""Bytes of an array from which packets are wide: fewer threads do more each, and less goes over the wire."""

WIDE_THREADS, WIDE_BLOCKS = 64, 512
"""Threads of a block then, and most blocks."""

BLOCKS = 256
"""Most blocks that exchange: more would only wait. Alike on all ranks, since it decides on the chunks."""

KNOWN_RANKS = 8
"""Most ranks for whose number packets have a kernel of their own, in which every loop over ranks is unrolled."""

PART_BYTES = (2048, 65536)
"""Least and most bytes of a rank's part of a chunk; more only where there would be more than MOST_CHUNKS."""

MOST_CHUNKS = 1 << 16
"""Chunks of an array."""

CELLS_IN_FLIGHT = 4
"""Cells that a thread loads before it combines the first."""

BLOCKS_PER_SM = 4
"""Blocks a multiprocessor that read a field: one wave, each as long as the field takes."""

_ALIGNMENT = 256

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
"""The parameter of all kernels, as in ``allreduce_body.cu``."""

PARTIALS = np.dtype([("at", "u8"), ("identity", "u8", (2,))])
"""The parameter of ``allreduce_field`` for its blocks' results."""


@dataclass(frozen=True)
class ReductionPlan:
    """Plan of a reduction by a kernel, apart from addresses.

    Attributes
    ----------
    function : str
        The kernel: a file's name, without its ``.cu``, and that of the function in it.
    defines : tuple of (str, str)
        Parameters that it is compiled with.
    ranks : int
    elements : int
        Of the array; 1 for a field reduction.
    chunks, chunk_elements : int
        Pieces in which blocks take turns, and elements of a rank's part of one (of a chunk, if it has no parts).
    threads, blocks : int
        Launch shape.
    rank_bytes, slot_bytes, flag_bytes : int
        Of what a rank stores in a slot; of a slot; of the flags behind the slots.
    slots : {1, 2}
    partial_bytes : int
        Of the blocks' results, which no other rank sees.
    """

    function: str
    defines: tuple[tuple[str, str], ...]
    ranks: int
    elements: int
    chunks: int
    chunk_elements: int
    threads: int
    blocks: int
    rank_bytes: int
    slot_bytes: int
    flag_bytes: int = 0
    partial_bytes: int = 0
    slots: int = 2

    @property
    def flags_offset(self) -> int:
        """Offset of the flags."""
        return self.slots * self.slot_bytes

    @property
    def state_offset(self) -> int:
        """Offset of this rank's state, behind what peers write to."""
        return _rounded(self.flags_offset + self.flag_bytes)

    @property
    def partials_offset(self) -> int:
        """Offset of the blocks' results."""
        return self.state_offset + _ALIGNMENT

    @property
    def memory_bytes(self) -> int:
        """Bytes of a rank's memory."""
        return self.partials_offset + _rounded(self.partial_bytes)

    @property
    def signature(self) -> tuple[object, ...]:
        """Part of the plan that must be alike on all ranks."""
        shape = self.threads if self.chunk_elements == self.threads else 0
        return (
            self.function,
            *(text for _, text in self.defines),
            self.ranks,
            self.elements,
            self.chunks,
            self.chunk_elements,
            shape,
            self.rank_bytes,
            self.slot_bytes,
        )

    def parameter(
        self, rank: int, memory: Sequence[int], failure: int, limit_ns: int
    ) -> np.ndarray[Any, Any]:
        """Return the kernel's parameter but for ``source`` and ``target``, shape (1,) of ALLREDUCE."""
        found = np.zeros(1, ALLREDUCE)
        entry = found[0]
        entry["state"] = memory[rank] + self.state_offset
        entry["failure"], entry["limit_ns"] = failure, limit_ns
        entry["flags"] = self.flags_offset
        entry["rank"] = rank
        names = ("ranks", "elements", "chunks", "chunk_elements", "rank_bytes", "slot_bytes")
        for name in names:
            entry[name] = getattr(self, name)
        entry["memory"][: self.ranks] = memory
        return found


def plan_oneshot(dtype: np.dtype[Any], op: str, elements: int, ranks: int) -> ReductionPlan:
    """Plan the reduction of a small array: everything to everybody, in packets.

    Not collective; touches no device. Takes ``2 * ranks`` times the packets' bytes in device memory, and packets are
    twice the array; from WIDE_BYTES on they are wide.

    Examples
    --------
    >>> plan = plan_oneshot(np.dtype("f8"), "sum", 1000, 8)
    >>> plan.threads, plan.chunks, plan.blocks, plan.slot_bytes
    (256, 4, 4, 131072)
    """
    if elements * dtype.itemsize >= WIDE_BYTES and dtype.itemsize <= 8:
        return plan_wide(dtype, op, elements, ranks)
    operation = _checked(dtype, op, ranks)
    each = max(1, 8 // dtype.itemsize)
    units = -(-elements // each)
    threads = _threads(units)
    chunks = -(-units // threads)
    _check_chunks(chunks, elements, MOST_CHUNKS * threads * each)
    rank_bytes = chunks * threads * (32 if dtype.itemsize == 16 else 16)
    return ReductionPlan(
        "allreduce_oneshot",
        _defines(dtype, operation, ranks),
        ranks,
        elements,
        chunks,
        threads,
        threads,
        min(chunks, BLOCKS),
        rank_bytes,
        ranks * rank_bytes,
    )


def plan_wide(dtype: np.dtype[Any], op: str, elements: int, ranks: int) -> ReductionPlan:
    """Plan the reduction of a medium array: everything to everybody, in LL128-like packets.

    Parameters, errors and notes as of :func:`plan_oneshot`, for elements of at most 8 bytes; packets are 8/7 of the
    array.

    Examples
    --------
    >>> plan = plan_wide(np.dtype("f8"), "sum", 1 << 17, 2)
    >>> plan.threads, plan.chunks, plan.blocks
    (64, 293, 293)
    """
    operation = _checked(dtype, op, ranks)
    if dtype.itemsize > 8:
        raise FieldError(f"elements of {dtype.itemsize} bytes do not travel in LL128-like packets")
    warps = WIDE_THREADS // 32
    tiles = -(-elements * dtype.itemsize // TILE_DATA_BYTES)
    chunks = max(1, -(-tiles // warps))
    _check_chunks(chunks, elements, MOST_CHUNKS * warps * TILE_DATA_BYTES // dtype.itemsize)
    rank_bytes = chunks * warps * TILE_BYTES
    return ReductionPlan(
        "allreduce_wide",
        _defines(dtype, operation, ranks),
        ranks,
        elements,
        chunks,
        warps * TILE_DATA_BYTES // dtype.itemsize,
        WIDE_THREADS,
        min(chunks, WIDE_BLOCKS),
        rank_bytes,
        ranks * rank_bytes,
    )


def _check_chunks(chunks: int, elements: int, most: int) -> None:
    if chunks > MOST_CHUNKS:
        raise FieldError(
            f"{elements} elements are too many for packets, at most {most} are not; reduce by "
            "'reduce_scatter_allgather'"
        )


def plan_scattered(dtype: np.dtype[Any], op: str, elements: int, ranks: int) -> ReductionPlan:
    """Plan the reduction of a large array: each rank combines a part, and all gather the parts.

    Parameters, errors and notes as of :func:`plan_oneshot`. Takes twice the array in device memory.

    Examples
    --------
    >>> plan = plan_scattered(np.dtype("f8"), "sum", 1 << 20, 2)
    >>> plan.chunk_elements, plan.chunks, plan.blocks
    (2048, 256, 256)
    """
    operation = _checked(dtype, op, ranks)
    nbytes = elements * dtype.itemsize
    wanted = min(max(-(-nbytes // (ranks * BLOCKS)), PART_BYTES[0]), PART_BYTES[1])
    wanted = max(wanted, -(-nbytes // (ranks * MOST_CHUNKS)))
    part_bytes = 1 << (wanted - 1).bit_length()  # a multiple of 16, so that all parts are aligned
    chunk_elements = part_bytes // dtype.itemsize
    chunks = -(-elements // (chunk_elements * ranks))
    rank_bytes = chunks * part_bytes
    return ReductionPlan(
        "allreduce_scattered",
        _defines(dtype, operation),
        ranks,
        elements,
        chunks,
        chunk_elements,
        THREADS,
        min(chunks, BLOCKS),
        rank_bytes,
        2 * ranks * rank_bytes,
        2 * ranks * chunks * 4,
        slots=1,
    )


@dataclass(frozen=True)
class FieldOperation:
    """A field reduction: how a cell counts, and what the result becomes.

    Attributes
    ----------
    op : str
        How cells are combined.
    local, finish : str
        Names in ``allreduce_field.cu``: of what a cell counts for, and of what is made of the result.
    has_other : bool
        Whether it takes two fields.
    """

    op: str
    local: str = "Value"
    finish: str = "Plain"
    has_other: bool = False

    def accumulator(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the dtype in which it is formed: 64 bits for what is added, the field's own for what is compared."""
        if self.op in ("min", "max"):
            return dtype
        return np.dtype("f8") if self.local == "Square" else wide_dtype(dtype)

    def identity(self, dtype: np.dtype[Any]) -> Any:
        """Return the accumulator that leaves others as they are."""
        found = self.accumulator(dtype)
        if self.op not in ("min", "max"):
            return found.type(0)
        if found.kind == "f":
            return found.type(np.inf if self.op == "min" else -np.inf)
        if found.kind == "b":
            return found.type(self.op == "min")
        limits = np.iinfo(found)
        return found.type(limits.max if self.op == "min" else limits.min)


FIELD_REDUCTIONS: dict[str, FieldOperation] = {
    "sum": FieldOperation("sum"),
    "min": FieldOperation("min"),
    "max": FieldOperation("max"),
    "norm": FieldOperation("sum", "Square", "Root"),
    "dot": FieldOperation("sum", "Product", has_other=True),
    "squares": FieldOperation("sum", "Square"),
}
"""Field reductions, by the name of the grid's method; "squares" are what "norm" is the root of."""


def plan_meeting(name: str, dtype: np.dtype[Any], ranks: int, *, sms: int) -> ReductionPlan:
    """Plan what ranks need to meet for a number of any field of a dtype, by launches of :func:`plan_field`.

    Parameters, errors as of :func:`plan_field`.
    """
    return _planned_field(FIELD_REDUCTIONS[name], dtype, 1, 0, ranks, sms)


def plan_value(name: str, dtype: np.dtype[Any], ranks: int, *, sms: int) -> ReductionPlan:
    """Plan the launch for a rank whose cells have been combined already, to one accumulator.

    Parameters, errors as of :func:`plan_field`. Meets launches of that.
    """
    found = FIELD_REDUCTIONS[name]
    return _planned_field(
        FieldOperation(found.op, "Value", found.finish), found.accumulator(dtype), 1, 0, ranks, sms
    )


def plan_field(name: str, dtype: np.dtype[Any], row: Row, ranks: int, *, sms: int) -> ReductionPlan:
    """Plan the launch of a field reduction."""
    return _planned_field(FIELD_REDUCTIONS[name], dtype, row.words, len(row.levels), ranks, sms)


def _planned_field(
    reduction: FieldOperation, dtype: np.dtype[Any], words: int, levels: int, ranks: int, sms: int
) -> ReductionPlan:
    # Cells that are added are added in 64 bits, so bools can be counted.
    _checked(np.dtype("i8") if dtype.kind == "b" else dtype, reduction.op, ranks)
    accumulator = reduction.accumulator(dtype)
    threads = _threads(words)
    wanted = -(-words // (threads * CELLS_IN_FLIGHT))
    most = BLOCKS_PER_SM * sms
    blocks = max(1, min(wanted, most))
    unit_bytes = 32 if accumulator.itemsize == 16 else 16
    kept_levels = 3 if levels <= 3 else MAX_LEVELS  # few kinds, because each is compiled
    return ReductionPlan(
        "allreduce_field",
        (
            ("ELEMENT", _element(dtype)),
            ("ACCUMULATOR", _element(accumulator)),
            ("LOCAL", reduction.local),
            ("OP", find_operation(reduction.op, accumulator).kernel_name),
            ("FINISH", reduction.finish),
            ("MAX_LEVELS", str(kept_levels)),
            ("IN_FLIGHT", str(CELLS_IN_FLIGHT)),
            ("MAX_THREADS", str(THREADS)),
        ),
        ranks,
        1,
        1,
        1,
        threads,
        blocks,
        unit_bytes,
        ranks * unit_bytes,
        0,
        most * accumulator.itemsize,
    )


def field_row(
    pointer: int,
    shape: Sequence[int],
    strides: Sequence[int],
    itemsize: int,
    other: tuple[int, Sequence[int]] | None = None,
) -> Row:
    """Return the cells of a field, or the same cells of two, as loops over elements.

    Examples
    --------
    >>> field_row(0, (4, 6, 8), (640, 80, 8), 8).levels
    (Level(steps=4, source_stride=640, target_stride=0), Level(steps=6, source_stride=80, target_stride=0), \
Level(steps=8, source_stride=8, target_stride=0))
    >>> field_row(0, (4, 6, 8), (384, 64, 8), 8).levels
    (Level(steps=192, source_stride=8, target_stride=0),)
    """
    other_pointer, other_strides = (0, [0] * len(shape)) if other is None else other
    levels = _levels(shape, strides, other_strides)
    if not prod(shape):
        raise FieldError("a field of no cells on a rank cannot be reduced there")
    if prod(shape) > MAX_WORDS or len(levels) > MAX_LEVELS:
        raise FieldError(
            f"a field of {prod(shape)} cells in {len(levels)} nested loops is more than a kernel walks: at most "
            f"{MAX_WORDS} cells in {MAX_LEVELS} loops"
        )
    return Row(pointer, other_pointer, itemsize, tuple(levels))


def can_walk(field: Described, other: Described | None = None) -> bool:
    """Whether a kernel walks the cells of a field, or of two: there are some, and not too many."""
    strides = other.strides if other is not None else [0] * len(field.shape)
    levels = _levels(field.shape, field.strides, strides)
    return 0 < prod(field.shape) <= MAX_WORDS and len(levels) <= MAX_LEVELS


def check_aligned(field: Described) -> None:
    """Raise unless a field's cells are at multiples of what a GPU loads."""
    part = field.dtype.itemsize // (2 if field.dtype.kind == "c" else 1)
    strides = (stride for n, stride in zip(field.shape, field.strides, strict=True) if n > 1)
    if field.pointer % part or any(stride % part for stride in strides):
        raise FieldError(
            f"a field's address and strides must be multiples of {part} bytes to be reduced on a GPU, got address "
            f"{field.pointer:#x} and strides {field.strides}; copy it first"
        )


def _levels(
    shape: Sequence[int], strides: Sequence[int], other_strides: Sequence[int]
) -> list[Level]:
    """Return loops over the cells of two fields, outermost first; those without gaps are one."""
    levels: list[Level] = []
    for steps, stride, other_stride in zip(shape, strides, other_strides, strict=True):
        if steps == 1:
            continue
        last = levels[-1] if levels else None
        if last is not None and last[1:] == (stride * steps, other_stride * steps):
            levels[-1] = Level(last.steps * steps, stride, other_stride)
        else:
            levels.append(Level(steps, stride, other_stride))
    return levels


def _checked(dtype: np.dtype[Any], op: str, ranks: int) -> Operation:
    if ranks > MOST_RANKS:
        raise FieldError(f"{ranks} ranks are more than the {MOST_RANKS} that a kernel serves")
    return find_operation(op, dtype)


def _threads(units: int) -> int:
    """Threads of a block, a power of two."""
    return min(THREADS, max(LEAST_THREADS, 1 << (units - 1).bit_length() if units else 1))


def _element(dtype: np.dtype[Any]) -> str:
    return ELEMENTS[f"{dtype.kind}{dtype.itemsize}"]


def _defines(
    dtype: np.dtype[Any], operation: Operation, ranks: int = 0
) -> tuple[tuple[str, str], ...]:
    return (
        ("RANKS", str(ranks if ranks <= KNOWN_RANKS else 0)),
        ("ELEMENT", _element(dtype)),
        ("ELEMENT_BYTES", str(dtype.itemsize)),
        ("OP", operation.kernel_name),
        ("MAX_THREADS", str(THREADS)),
    )


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
