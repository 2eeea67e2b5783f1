"""The datatype: an immutable description of the bytes of memory that make up a message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from halox.datatypes.arguments import count_of
from halox.datatypes.bounds import Bounds, check_reach
from halox.datatypes.layout import EMPTY, BlockList, Layout, StridedBlocks
from halox.datatypes.mpi_handles import derived_handle, primitive_handle, with_bounds
from halox.datatypes.signature import Signature
from halox.errors import DatatypeError
from halox.values import shown

if TYPE_CHECKING:
    from mpi4py import MPI


class Datatype:
    """Description of the bytes that make up one item of a message, as in MPI.

    Use the constructors of :mod:`halox.datatypes` to make one. A datatype is immutable and
    independent of arrays: displacements are relative to the buffer of the call that uses it.

    Notes
    -----
    Two datatypes are equal if they touch the same bytes in the same order and have the same bounds
    and the same primitives. It does not matter which constructors made them.

    Examples
    --------
    >>> from halox.datatypes import subarray, vector
    >>> face = subarray((4, 6), (3, 2), (0, 0), "f8")
    >>> face
    <Datatype subarray((4, 6), (3, 2), (0, 0), f8, C): 48 bytes, extent 192>
    >>> face.strided
    StridedBlocks(offset=0, counts=(3,), strides=(48,), block_bytes=16)
    >>> face.same_layout(vector(3, 2, 6, "f8"))
    True
    >>> face == vector(3, 2, 6, "f8")  # another extent
    False
    """

    __slots__ = (
        "arguments",
        "bounds",
        "constructor",
        "host_layouts",
        "layout",
        "olds",
        "signature",
        "size",
    )

    constructor: str
    """Name of the constructor that made this datatype, such as ``"vector"``."""
    arguments: tuple[Any, ...]
    """The constructor's arguments without the old types."""
    olds: tuple[Datatype, ...]
    """The old types, that is, the constructor's datatype arguments; empty for a primitive."""
    size: int
    """Bytes of data in one item."""
    bounds: Bounds
    """Bounds, true bounds and alignment."""
    layout: Layout
    """Blocks of one item, in order."""
    signature: Signature
    """The sequence of primitive types, comparable in constant time."""
    host_layouts: dict[int, Any]
    """Layouts of the host packer, by number of items."""

    def __init__(
        self,
        constructor: str,
        arguments: tuple[object, ...],
        olds: tuple[Datatype, ...],
        size: int,
        bounds: Bounds,
        layout: Layout,
        signature: Signature,
    ) -> None:
        check_reach(constructor, size, bounds)
        self.constructor = constructor
        self.arguments = arguments
        self.olds = olds
        self.size = size
        self.bounds = bounds
        self.layout = layout
        self.signature = signature
        self.host_layouts = {}

    def __reduce__(self) -> tuple[type[Datatype], tuple[object, ...]]:
        """Pickle and copy the datatype without the packers' layouts."""
        parts = (self.constructor, self.arguments, self.olds, self.size)
        return Datatype, (*parts, self.bounds, self.layout, self.signature)

    @property
    def extent(self) -> int:
        """Distance in bytes between consecutive items."""
        return self.bounds.extent

    @property
    def lb(self) -> int:
        """Lower bound in bytes."""
        return self.bounds.lb

    @property
    def ub(self) -> int:
        """Upper bound in bytes."""
        return self.bounds.ub

    @property
    def true_lb(self) -> int:
        """Displacement of the first byte touched."""
        return self.bounds.true_lb

    @property
    def true_ub(self) -> int:
        """Displacement one past the last byte touched."""
        return self.bounds.true_ub

    @property
    def true_extent(self) -> int:
        """Bytes from the first byte touched to the last, both included."""
        return self.bounds.true_ub - self.bounds.true_lb

    @property
    def elements(self) -> int:
        """Number of primitives in one item."""
        return self.signature.elements

    @property
    def uniform(self) -> np.dtype | None:
        """The primitives' dtype if all primitives are equal, else None."""
        return self.signature.uniform

    @property
    def strided(self) -> StridedBlocks | None:
        """Canonical strided form of one item, or None if its blocks are not regular.

        Notes
        -----
        Immediate for nested contiguous types, vectors and subarrays. For an indexed type or a
        struct, the first access walks the blocks once.
        """
        return self.layout.strided

    def with_bounds(self, bounds: Bounds) -> Datatype:
        """Copy the datatype with other bounds."""
        parts = (self.constructor, self.arguments, self.olds, self.size)
        return Datatype(*parts, bounds, self.layout, self.signature)

    def items(self, count: int) -> Layout:
        """Layout of ``count`` consecutive items.

        Raises
        ------
        DatatypeError
            If ``count`` is not an integer, or negative, or the items span 2**63 bytes or more.
        """
        if type(count) is not int or count < 0:
            count = count_of("count", count)
        if count == 1:
            return self.layout
        if count == 0:
            return EMPTY
        self.reach(count)
        return self.layout.repeated(count, self.extent)

    def reach(self, count: int) -> tuple[int, int]:
        """Return the half-open range of the bytes that ``count`` consecutive items touch.

        Raises
        ------
        DatatypeError
            If the items span 2**63 bytes or more.
        """
        if not count or not self.size:
            return 0, 0
        if count == 1:
            return self.bounds.true_lb, self.bounds.true_ub
        last = (count - 1) * self.extent
        items = self.bounds.over(min(0, last), max(0, last))
        check_reach(f"{count} item(s) of {self!r}", count * self.size, items)
        return items.true_lb, items.true_ub

    def blocks(self, count: int = 1) -> BlockList:
        """Block list of ``count`` consecutive items.

        The blocks are in the order of the typemap. A block that begins at the end of the previous
        block is merged with it.

        Parameters
        ----------
        count : int
            Number of items, ``extent`` bytes apart.

        Returns
        -------
        BlockList
            Displacements and lengths in bytes, two int64 arrays of shape ``(n_blocks,)``.

        Raises
        ------
        DatatypeError
            If ``count`` is not an integer, or negative.

        Examples
        --------
        >>> from halox.datatypes import indexed
        >>> blocks = indexed([2, 1, 1], [0, 4, 5], "f4").blocks()
        >>> blocks.offsets.tolist(), blocks.lengths.tolist()
        ([0, 16], [8, 8])
        """
        return self.items(count).block_list()

    def overlaps(self, count: int = 1) -> bool:
        """Whether ``count`` consecutive items touch a byte twice.

        MPI allows overlapping items in sends, but not in receives.

        Raises
        ------
        DatatypeError
            If ``count`` is not an integer, or negative.
        """
        layout = self.items(count)
        strided = layout.strided
        if strided is not None and not strided.overlaps:
            return False
        return layout.block_list().overlaps

    def same_layout(self, other: Datatype) -> bool:
        """Whether one item of each datatype touches the same bytes in the same order.

        Raises
        ------
        DatatypeError
            If ``other`` is not a datatype.
        """
        if not isinstance(other, Datatype):
            raise DatatypeError(f"other must be a Datatype, got {shown(other)}")
        return self.layout is other.layout or (
            self.size == other.size and self.layout.same_as(other.layout)
        )

    def to_mpi(self) -> MPI.Datatype:
        """Make an equivalent mpi4py datatype.

        Returns
        -------
        mpi4py.MPI.Datatype
            Committed. The caller must free it.

        Raises
        ------
        MissingPackageError
            If mpi4py is not installed.

        Notes
        -----
        Not collective. A primitive without an MPI type (strings, datetimes, other byte orders,
        ``f2`` in most builds) becomes bytes, and :func:`from_mpi` reads it back as bytes.
        """
        return self._handle().Commit()

    def _handle(self) -> MPI.Datatype:
        """Make the mpi4py datatype without committing it."""
        if self.constructor == "primitive":
            return primitive_handle(self.arguments[0])
        olds = [old._handle() for old in self.olds]
        try:
            extent = self.olds[0].extent if self.olds else 0
            handle = derived_handle(self.constructor, self.arguments, olds, extent)
        finally:
            for old in olds:
                old.Free()
        return with_bounds(handle, self.lb, self.extent)

    def __eq__(self, other: object) -> bool:
        """Whether both datatypes have the same bytes, bounds and primitives."""
        if not isinstance(other, Datatype):
            return NotImplemented
        return (
            self.lb == other.lb
            and self.ub == other.ub
            and self.signature == other.signature
            and self.same_layout(other)
        )

    def __hash__(self) -> int:
        return hash((self.lb, self.ub, self.signature.digest))

    def __repr__(self) -> str:
        return f"<Datatype {self.describe()}: {self.size} bytes, extent {self.extent}>"

    def describe(self) -> str:
        """Short text with the constructor and its arguments; long lists are shortened."""
        if self.constructor == "primitive":
            return str(self.signature).removesuffix(" x 1")
        arguments = [_short(argument) for argument in self.arguments]
        if self.constructor == "struct":
            arguments.append(_short([old.describe() for old in self.olds]))
        elif self.constructor == "resized":
            arguments.insert(0, self.olds[0].describe())
        else:
            # The old type is the last argument, except that a subarray's order follows it.
            at = 3 if self.constructor == "subarray" else len(arguments)
            arguments.insert(at, self.olds[0].describe())
        return f"{self.constructor}({', '.join(arguments)})"


def _short(argument: object) -> str:
    """Text of one argument; lists are cut after three entries."""
    if isinstance(argument, (np.ndarray, list)):
        head = ", ".join(str(entry) for entry in argument[:3])
        return f"[{head}, ... {len(argument)} in all]" if len(argument) > 3 else f"[{head}]"
    return str(argument)
