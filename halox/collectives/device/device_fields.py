"""The numbers of a GPU grid's fields, and its allreduces of arrays: made at their first call and kept.

Where all ranks' kernels can signal to one another, a number is one launch: the rank's cells, and then the ranks. Where
they cannot, one launch combines the rank's cells, and the fastest allreduce of one element the ranks. Cells that no
kernel walks are combined by CuPy first.

All that ranks decide together follows from the number and the dtypes, which they compare when it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from halox.collectives.device.device_algorithms import (
    DeviceAlgorithm,
    make_algorithm,
    why_no_kernels,
)
from halox.collectives.device.device_allreduce import DeviceAllreduce
from halox.collectives.device.kernel_plans import FIELD_REDUCTIONS, MOST_RANKS, check_aligned
from halox.collectives.device.kernel_reductions import (
    FieldReduction,
    Target,
    make_field_reduction,
    make_local_reduction,
)
from halox.collectives.operations import ELEMENTS, find_operation
from halox.collectives.reductions import check_numeric, check_ordered, check_out, wide_dtype
from halox.errors import DeviceError, FieldError, HaloxError, StateError
from halox.runtime.array_cache import Seen
from halox.runtime.arrays import Described, describe
from halox.runtime.context import Context
from halox.runtime.gpu.capture import is_capturing
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.devices import as_device_array

_DOING = "a reduction"
_MOST_ARRAYS = 32
"""Allreduces of arrays that are kept."""

Prepared = tuple[Callable[[], Any], tuple[int, ...]]
"""A launch, which returns the result's array if it makes one, and the shape that the arrays of a call must have."""


@dataclass(frozen=True)
class Cells:
    """A field's cells on this rank, halo left out: where they lie, and as an array."""

    described: Described
    view: Callable[[], Any]


class Number(Protocol):
    """A number of fields of one dtype; collective to make, to call and to close."""

    def __call__(self, cells: Sequence[Cells], out: Any) -> Any:
        """Return ``out``, an array of one element, with the number of some cells."""

    def bound(self, cells: Sequence[Cells], target: Target) -> Callable[[], Any] | None:
        """Prepare calls with these cells; None if a call is more than a launch."""

    def refuse(self, error: Exception) -> None:
        """Raise this rank's reason not to take part in a call, on the other ranks too."""

    def close(self) -> None:
        """Give back what it holds."""


def result_dtype(name: str, dtypes: Sequence[np.dtype[Any]]) -> np.dtype[Any]:
    """Return the dtype of a number.

    Raises
    ------
    FieldError
        If it has no meaning for the fields' dtypes.

    Examples
    --------
    >>> result_dtype("dot", [np.dtype("f4"), np.dtype("c8")])
    dtype('complex128')
    """
    for dtype in dtypes:
        check_numeric(dtype, name)
    check_ordered(dtypes[0], name)
    if name == "norm":
        return np.dtype("f8")
    if name in ("min", "max"):
        return dtypes[0]
    return wide_dtype(np.result_type(*dtypes))


class DeviceNumbers:
    """What a grid reduces on GPUs.

    Parameters
    ----------
    ground : Context
        The ranks.
    device : int
        This rank's GPU.

    Attributes
    ----------
    numbers_seen : Seen
        Launches by a number's name, its field, a second one or None, and ``out``.
    arrays_seen : Seen
        Launches by an allreduce's operation, its array, and ``out``.
    """

    def __init__(self, ground: Context, device: int) -> None:
        self._ground, self._world, self._device = ground, ground.world, device
        self._numbers: dict[tuple[str, ...], Number] = {}
        self._arrays: dict[tuple[Any, ...], DeviceAllreduce] = {}
        self.numbers_seen: Seen[Prepared] = Seen()
        self.arrays_seen: Seen[Prepared] = Seen()

    def number(
        self, name: str, fields: Sequence[Any], find: Callable[[], Sequence[Cells]], out: Any
    ) -> Any:
        """Return a number of all ranks' cells.

        Parameters
        ----------
        name : {"sum", "min", "max", "norm", "dot"}
        fields : sequence of arrays
            One, or two for "dot".
        find : callable
            Returns this rank's cells of them; may raise a `HaloxError`.
        out : array or None
            Of one element of the number's dtype, on this rank's GPU.

        Returns
        -------
        array
            ``out``, or a new CuPy array of shape ().

        Notes
        -----
        Collective.
        """
        number: Number | None = None
        try:
            cells = find()
            dtypes = [one.described.dtype for one in cells]
            key = (name, *(one.str for one in dtypes))
            number = self._numbers.get(key)
            dtype = result_dtype(name, dtypes)
            new = partial(cupy().empty, (), dtype)
            target = new() if out is None else self._target(out, dtype)
        except HaloxError as error:
            known = [one for of, one in self._numbers.items() if of[0] == name]
            self._refuse(name, known if number is None else [number], error)
            raise
        if number is None:
            number = self._numbers[key] = self._make(name, dtypes)
        number(cells, target)
        if out is not None or self.numbers_seen.again(fields):
            launch = number.bound(cells, new if out is None else target.data.ptr)
            first, other = fields if len(fields) > 1 else (fields[0], None)
            if launch is not None and hasattr(first, "shape"):
                self.numbers_seen.keep(name, (first, other, out), (launch, first.shape))
        return target if out is None else out

    def forget(self) -> None:
        """Look at all fields again at their next calls, since what belongs to them has changed; local."""
        self.numbers_seen.clear()

    def _target(self, out: Any, dtype: np.dtype[Any]) -> Any:
        found = describe(out, "out")
        if found.device != self._device:
            where = "the host" if found.device is None else f"GPU {found.device}"
            raise DeviceError(
                f"out lies on {where}, rank {self._world.rank} reduces on GPU {self._device}; allocate it there"
            )
        check_out(found, None, dtype)
        return as_device_array(out)

    def _refuse(
        self, name: str, known: Sequence[Number | DeviceAllreduce], error: Exception
    ) -> None:
        """Raise an error of this rank's arguments, on the other ranks too if it is clear what they call."""
        if len(known) == 1:
            known[0].refuse(error)
        if not known:
            self._world.begin(name)  # they are making it
            self._world.agree(error, _DOING)

    def _make(self, name: str, dtypes: Sequence[np.dtype[Any]]) -> Number:
        world, ground = self._world, self._ground

        def begin() -> None:
            if is_capturing():
                raise StateError(
                    f"the current stream is being captured, and this is the first {name} of a field of {dtypes[0]}; "
                    "take it once before the capture"
                )
            ground.use_device(self._device)
            cupy().cuda.Device(self._device).synchronize()

        world.begin(name)
        world.guarded(begin, _DOING)
        mine = {"reduction": name, "dtype": ", ".join(map(str, dtypes))}
        world.compare(mine, _DOING)
        assert ground.device_arena is not None
        # All ranks' GPUs have been idle since the first of them came here.
        ground.device_arena.reclaim()
        topology = ground.find_gpus()
        reason = why_no_kernels(world, topology)
        if world.size > MOST_RANKS:
            reason = f"{world.size} ranks are more than a kernel serves"
        is_known = f"{dtypes[0].kind}{dtypes[0].itemsize}" in ELEMENTS and len(set(dtypes)) == 1
        if is_known and reason is None:
            made = make_field_reduction(world, ground.device_arena, name, dtypes[0])
            return InOneLaunch(name, made)
        return InTwoSteps(ground, self._device, name, dtypes, is_known)

    def array(self, array: Any, op: str, out: Any) -> Any:
        """Return the combination of all ranks' arrays on GPUs; collective."""
        key: tuple[Any, ...] = ()
        try:
            found = describe(array)
            find_operation(op, found.dtype)
            key = tuple(found.shape), found.dtype.str, op
            reduce = self._arrays.get(key)
        except HaloxError as error:
            self._refuse("allreduce", list(self._arrays.values()), error)
            raise
        if reduce is None:
            self._world.begin("allreduce")
            self._world.agree(None, _DOING)
            mine = {"shape": key[0], "dtype": str(found.dtype), "op": op}
            self._world.compare(mine, _DOING)
            reduce = DeviceAllreduce(self._ground, self._device, key[0], found.dtype, op)
            self._arrays[key] = reduce
            if len(self._arrays) > _MOST_ARRAYS:
                # By age and not by use, which a rank's own errors may change, so that all ranks close the same one.
                self.arrays_seen.clear()
                self._arrays.pop(next(iter(self._arrays))).close()
        result = reduce(array, out)
        launch = reduce.seen.found.get(("", id(array), id(out)))
        if launch is not None:
            self.arrays_seen.keep(op, (array, out), (launch, array.shape))
        return result

    def close(self) -> None:
        """Give back what all of them hold; collective."""
        self.numbers_seen.clear()
        self.arrays_seen.clear()
        for number in self._numbers.values():
            number.close()
        for reduce in self._arrays.values():
            reduce.close()
        self._numbers.clear()
        self._arrays.clear()


class InOneLaunch:
    """By kernels that combine the cells and then the ranks."""

    def __init__(self, name: str, reduction: FieldReduction) -> None:
        self._name, self._reduction = name, reduction
        self._current_stream = cupy().cuda.get_current_stream

    def __call__(self, cells: Sequence[Cells], out: Any) -> Any:
        """Launch; does not block."""
        first = cells[0].described
        other = cells[1].described if len(cells) > 1 else None
        stream = self._current_stream()
        try:
            if self._reduction.walks(first, other):
                self._reduction(first, other, out.data.ptr, stream)
            else:
                value = combine_by_cupy("squares" if self._name == "norm" else self._name, cells)
                self._reduction.of_value(value.data.ptr, out.data.ptr, stream)
        except HaloxError as error:
            self.refuse(error)
        return out

    def bound(self, cells: Sequence[Cells], target: Target) -> Callable[[], Any] | None:
        """Return the launch for these cells, None if CuPy combines them first."""
        first = cells[0].described
        other = cells[1].described if len(cells) > 1 else None
        if not self._reduction.walks(first, other):
            return None
        return self._reduction.bound(first, other, target)

    def refuse(self, error: Exception) -> None:
        """Cancel the reduction, and raise."""
        self._reduction.cancel(self._current_stream())
        raise error

    def close(self) -> None:
        """Wait for the last launch."""
        self._reduction.close()


class InTwoSteps:
    """By a launch for the rank's cells, or by CuPy, and an allreduce of one element; collective to make.

    Notes
    -----
    What goes wrong on one rank is told to the others where the host takes part in the allreduce.
    """

    def __init__(
        self,
        ground: Context,
        device: int,
        name: str,
        dtypes: Sequence[np.dtype[Any]],
        is_known: bool,
    ) -> None:
        assert ground.device_arena is not None
        self._name = name
        self._local = "squares" if name == "norm" else name
        self._dtype = result_dtype(name, dtypes)
        if f"{self._dtype.kind}{self._dtype.itemsize}" not in ELEMENTS:
            self._dtype = np.dtype("f4")  # of float16, exactly
        op = FIELD_REDUCTIONS[name].op
        self._all: DeviceAlgorithm
        self._all, self.algorithm, _ = make_algorithm(ground, device, (op, self._dtype, 1))
        self._cells: FieldReduction | None = None
        if is_known:
            arena, world = ground.device_arena, ground.world
            self._cells = world.guarded(
                lambda: make_local_reduction(world, arena, self._local, dtypes[0]), _DOING
            )

    def __call__(self, cells: Sequence[Cells], out: Any) -> Any:
        """Launch, and combine; blocks as the allreduce does."""
        cp = cupy()
        stream = cp.cuda.get_current_stream()
        value, error = None, None
        try:
            if not self._all.captures and is_capturing(stream):
                raise StateError(
                    f"a {self._name} cannot be captured in a CUDA graph here: the ranks are combined by the "
                    f"{self.algorithm!r} algorithm, which needs the host; it can where every rank has a GPU of its own"
                )
            value = self._value(cells, stream)
        except Exception as caught:
            error = caught
        if error is not None:
            self.refuse(error)
        assert value is not None
        is_direct = self._name != "norm" and out.dtype == self._dtype
        total = out if is_direct else value
        self._all.reduce(value.data.ptr, total.data.ptr, stream, None)
        if self._name == "norm":
            cp.sqrt(total.reshape(out.shape), out=out)
        elif not is_direct:
            out[...] = total.reshape(out.shape)
        return out

    def bound(self, cells: Sequence[Cells], target: Target) -> Callable[[], Any] | None:
        """Return None: it takes two steps."""
        return None

    def refuse(self, error: Exception) -> None:
        """Raise, and tell the others as the allreduce does."""
        self._all.reduce(0, 0, cupy().cuda.get_current_stream(), error)

    def _value(self, cells: Sequence[Cells], stream: Any) -> Any:
        first = cells[0].described
        other = cells[1].described if len(cells) > 1 else None
        if self._cells is None or not self._cells.walks(first, other):
            return combine_by_cupy(self._local, cells).astype(self._dtype, copy=False)
        value = cupy().empty((), self._dtype)
        self._cells(first, other, value.data.ptr, stream)
        return value

    def close(self) -> None:
        """Give back what both steps hold; collective."""
        if self._cells is not None:
            self._cells.close()
        self._all.close()


def combine_by_cupy(name: str, cells: Sequence[Cells]) -> Any:
    """Return a number of this rank's cells, an array of shape ()."""
    cp = cupy()
    for one in cells:
        check_aligned(one.described)
    first, *others = (as_device_array(one.view()) for one in cells)
    if name == "squares":
        return cp.sum(cp.square(cp.abs(first.astype(wide_dtype(first.dtype))), dtype="f8"))
    if name == "dot":
        wide = wide_dtype(np.result_type(first.dtype, others[0].dtype))
        return cp.sum(cp.conj(first.astype(wide)) * others[0].astype(wide), dtype=wide)
    if name == "sum":
        return cp.sum(first, dtype=wide_dtype(first.dtype))
    if not first.size:
        raise FieldError(f"{name} has no meaning for a field of no cells")
    return getattr(cp, name)(first)
