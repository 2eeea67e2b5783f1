"""MPI as the oracle of datatypes: types built from recipes with MPI's constructors, packed and unpacked by MPI."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from halox.datatypes import Datatype
from tests import support
from tests.datatype_strategies import Recipe, build

support.require("mpi")
from mpi4py import MPI  # noqa: E402

GUARD = 32
OPEN_MPI = MPI.get_vendor()[0] == "Open MPI"


def mpi_type(recipe: Recipe, *, halves: bool = False) -> MPI.Datatype:
    """Build a recipe's type with MPI's constructors; compares bounds at every step.

    With ``halves``, a complex number is a type of two real numbers, with the same bytes. This avoids a bug of Open MPI
    5.0: when it packs, it rounds the distance between complex elements (and between long doubles) down to a multiple
    of their size. It reads three c8 at a stride of 12 bytes from 0, 8 and 16.
    """
    return _mpi_type(recipe, halves)[0]


def _mpi_type(recipe: Recipe, halves: bool) -> tuple[MPI.Datatype, bool]:
    """Return the datatype, and whether bounds of it or of a part replace the bounds from MPI."""
    name, arguments, olds = recipe
    if name == "primitive":
        dtype = np.dtype(arguments[0])
        if halves and dtype.kind == "c":
            real = MPI.Datatype.fromcode({8: "f", 16: "d"}[dtype.itemsize])
            return real.Create_contiguous(2), False
        return MPI.Datatype.fromcode(dtype.char).Dup(), False
    followed = [_mpi_type(old, halves) for old in olds]
    types = [old for old, _ in followed]
    fitted = any(of_part for _, of_part in followed)
    if name == "struct":
        made = MPI.Datatype.Create_struct(*arguments, types)
    elif name == "dup":
        made = types[0].Dup()
    elif name == "subarray":
        order = {"C": MPI.ORDER_C, "F": MPI.ORDER_F}[arguments[3]]
        made = types[0].Create_subarray(*arguments[:3], order)
    elif OPEN_MPI and byte_stride(recipe) == -1:
        # Open MPI 5.0 misinterprets a stride of -1 byte as "the old type's extent".
        count, blocklength, _ = arguments
        row = types[0].Create_contiguous(blocklength)
        made = row.Create_hindexed_block(1, [-step for step in range(count)])
        row.Free()
        fitted = True  # MPI pads it like an indexed type
    else:
        made = getattr(types[0], f"Create_{name}")(*arguments)
    for old in types:
        old.Free()
    return with_compared_bounds(recipe, made, fitted)


def byte_stride(recipe: Recipe) -> int | None:
    name, arguments, olds = recipe
    if name == "vector":
        return arguments[2] * build(olds[0]).extent
    return arguments[2] if name == "hvector" else None


def with_compared_bounds(
    recipe: Recipe, made: MPI.Datatype, fitted: bool
) -> tuple[MPI.Datatype, bool]:
    """Compare size and bounds; correct MPI's bounds where a known deviation excuses them.

    ``fitted`` tells whether a part has corrected bounds. These are explicit, and affect the bounds of the whole type.
    """
    ours = build(recipe)
    assert ours.size == made.Get_size()
    assert ours.ub == ours.lb + ours.extent
    assert ours.true_ub == ours.true_lb + ours.true_extent
    has_empty = any(part.size == 0 for part in parts(ours))
    if not has_empty:
        assert (ours.true_lb, ours.true_extent) == made.Get_true_extent()
    lb, extent = made.Get_extent()
    if (lb, extent) == (ours.lb, ours.extent):
        return made, fitted
    # The standard does not define the bounds of a type without bytes. Open MPI and MPICH differ on them, and on types
    # with parts without bytes.
    excused = has_empty or fitted
    if OPEN_MPI:
        # Open MPI rounds the extent up after every block, not once at the end, so that the extent may be too long by a
        # multiple of the alignment.
        too_long = extent - ours.extent
        excused |= pads_repeatedly(ours) and lb == ours.lb and too_long > 0 == too_long % 2
    else:
        # MPICH pads only structs of unlike types, and loses explicit bounds of parts.
        excused |= any(part.bounds.marked for part in parts(ours)) or is_padded(ours)
    assert excused, f"{recipe}: MPI has lb {lb}, extent {extent}; ours {ours.lb}, {ours.extent}"
    corrected = made.Create_resized(ours.lb, ours.extent)
    made.Free()
    return corrected, True


def parts(datatype: Datatype) -> Iterator[Datatype]:
    yield datatype
    for old in datatype.olds:
        yield from parts(old)


def pads_repeatedly(datatype: Datatype) -> bool:
    return any(
        part.constructor.removeprefix("h") in ("indexed", "indexed_block", "struct")
        and not part.bounds.marked
        and part.bounds.alignment > 1
        and len(part.arguments[-1]) > 1
        for part in parts(datatype)
    )


def is_padded(datatype: Datatype) -> bool:
    return any(
        part.constructor != "primitive" and not part.bounds.marked and part.bounds.alignment > 1
        for part in parts(datatype)
    )


class Memory:
    """The bytes that ``count`` items of a datatype touch around an origin, with guards on both sides."""

    def __init__(self, datatype: Datatype, count: int) -> None:
        last = (count - 1) * datatype.extent if count else 0
        low = min(0, datatype.true_lb, datatype.true_lb + last)
        high = max(1, datatype.true_ub, datatype.true_ub + last)
        self.origin = GUARD - low
        self.bytes = np.zeros(high - low + 2 * GUARD, np.uint8)

    @property
    def array(self) -> np.ndarray:
        """The memory from the origin on."""
        return self.bytes[self.origin :]


def one_item(made: MPI.Datatype, count: int) -> MPI.Datatype:
    """Return a type of ``count`` items with a huge extent, since mpi4py derives counts from buffer lengths."""
    items = made.Create_contiguous(count)
    single = items.Create_resized(0, 1 << 20).Commit()
    items.Free()
    return single


def at_origin(memory: Memory) -> MPI.buffer:
    return MPI.buffer.fromaddress(memory.bytes.ctypes.data + memory.origin, 1 << 20)


def mpi_pack(single: MPI.Datatype, memory: Memory, nbytes: int) -> np.ndarray:
    packed = np.zeros(nbytes, np.uint8)
    position = single.Pack(at_origin(memory), packed, 0, MPI.COMM_SELF) if nbytes else 0
    assert position == nbytes
    return packed


def mpi_unpack(packed: np.ndarray, single: MPI.Datatype, memory: Memory) -> None:
    if packed.size:
        single.Unpack(packed, 0, at_origin(memory), MPI.COMM_SELF)


def mpi_packs_rightly(datatype: Datatype) -> bool:
    """Whether MPI packs a type correctly and can be the oracle.

    MPICH 5.0 merges nested contiguous types, and packs wrong bytes if an inner extent is negative or zero. A struct
    with a part without bytes makes it divide by zero.
    """
    return OPEN_MPI or all(part.extent > 0 and part.size for part in parts(datatype))
