"""FFTs of CuPy arrays along some of their axes, by cached cuFFT plans.

A cuFFT plan reads and writes nested boxes: up to three transformed axes, each stride a multiple of the next, and one
batch with a constant distance. So a plan can read the interior of a field with halo and write a contiguous array. It
can also transform any axis of a contiguous array whose other axes form one batch. If the batch has several distances,
the transform needs several launches, or copies to a work array::

    shape (n0, n1, n2), contiguous      along 2: batch n0 * n1        along 0: batch n1 * n2, stride n1 * n2
    with a halo                         along (0, 1, 2): no batch     along 2: n0 batches of n1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from halox.errors import DeviceError, StateError
from halox.runtime.dlpack import DType
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.streams import StreamOrder, is_capturing

if TYPE_CHECKING:
    from halox.runtime.array_types import XArray

Run: TypeAlias = "Callable[[XArray, XArray], None]"
"""Transforms the first array into the second."""

Order: TypeAlias = tuple[int, ...] | None
"""Axes of a work array in memory order; None without a work array."""

_DIRECT: tuple[tuple[Order, Order], ...] = ((None, None),)
_FORWARD, _INVERSE = -1, 1
_MOST_AXES = 3
_MOST_LAUNCHES = 8
_LONG_LAUNCH_BYTES = 1 << 24
_LARGEST = 2**31 - 1
"""Largest number of elements for plans with 32-bit indices."""


@dataclass(frozen=True)
class Form:
    """Extents and strides (in elements) of an array, and whether it has the alignment that cuFFT requires."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    aligned: bool

    @classmethod
    def of(cls, array: XArray) -> Form:
        size = array.dtype.itemsize
        strides = tuple(s // size for s in array.strides)
        pointer = int(array.data.ptr)
        pair = size if array.dtype.kind == "c" else 2 * size
        whole = all(s % size == 0 for s in array.strides)
        return cls(array.shape, strides, array.dtype, whole and pointer % pair == 0)

    @classmethod
    def contiguous(cls, array: XArray, order: Sequence[int]) -> Form:
        """Describe a work array with the shape of ``array`` and the given memory order of axes."""
        strides = [0] * len(order)
        step = 1
        for axis in reversed(order):
            strides[axis] = step
            step *= array.shape[axis]
        return cls(array.shape, tuple(strides), array.dtype, True)


class PlanLaunches(NamedTuple):
    """A plan's arguments, and for each launch the first element in source and target."""

    arguments: tuple[Any, ...]
    starts: list[tuple[int, int]]


class _At:
    """Device address in the form that CuPy's plans accept."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    @property
    def data(self) -> _At:
        return self


class CuFFT:
    """FFTs on a GPU; the methods return functions of (source, target) for arrays with equal `key`.

    Results are not scaled. The methods must be called before a stream capture. Their functions run on CuPy's current
    stream, and can be captured. `c2r` overwrites its source.
    """

    scales = False  # a norm needs a separate kernel
    turns = True  # intermediate stages should store transformed axes innermost

    def __init__(self) -> None:
        self._plans: dict[tuple[Any, ...], Any] = {}
        self._work: dict[tuple[tuple[int, ...], DType], XArray] = {}
        self._order = StreamOrder()

    def begin(self) -> None:
        """Order the current stream after the stream of the last call, which used the same work arrays."""
        self._order.follow(cupy().cuda.get_current_stream())

    def close(self) -> None:
        """Wait for all calls, and drop plans and work arrays."""
        self._order.synchronize()
        self._plans.clear()
        self._work.clear()

    def key(self, array: XArray) -> object:
        """Return the cache key of an array: its alignment and strides."""
        return int(array.data.ptr) % 16, array.strides

    def empty(self, shape: tuple[int, ...], dtype: DType) -> XArray:
        array: XArray = cupy().empty(shape, dtype)
        return array

    def destroys(self, axes: Sequence[int]) -> bool:
        """Whether `c2r` overwrites its source."""
        return True

    def c2c(
        self, source: XArray, target: XArray, axes: Sequence[int], *, forward: bool, norm: str
    ) -> Run:
        sign = _FORWARD if forward else _INVERSE
        return self._along(source, target, tuple(axes), sign)

    def r2c(self, source: XArray, target: XArray, axes: Sequence[int], *, norm: str) -> Run:
        """Transform real numbers along some axes; the last of ``axes`` is halved."""
        rest, first = self._halved(source, target, axes, _FORWARD)
        return self._after(first, target, rest, _FORWARD)

    def c2r(self, source: XArray, target: XArray, axes: Sequence[int], *, norm: str) -> Run:
        """Transform halved spectra to real numbers along some axes; the last of ``axes`` is halved."""
        rest, final = self._halved(source, target, axes, _INVERSE)
        if not rest:
            return final
        before = self._along(source, source, rest, _INVERSE)

        def run(source: XArray, target: XArray) -> None:
            before(source, source)
            final(source, target)

        return run

    def _halved(
        self, source: XArray, target: XArray, axes: Sequence[int], sign: int
    ) -> tuple[tuple[int, ...], Run]:
        """Return the remaining axes, and a one-plan transform along the halved axis and as many others as possible."""
        *others, last = axes
        inner = (*sorted(others), last)
        orders = _orders(source)
        for size in range(min(len(inner), _MOST_AXES), 1, -1):
            run = self._by_one_plan(source, target, inner[-size:], sign, orders, half=True)
            if run is not None:
                return inner[:-size], run
        return inner[:-1], self._one_axis(source, target, last, sign, half=True)

    def _along(self, source: XArray, target: XArray, axes: tuple[int, ...], sign: int) -> Run:
        """Transform complex numbers with as few plans as possible."""
        axes = tuple(sorted(axes))
        for size in range(min(len(axes), _MOST_AXES), 1, -1):
            run = self._by_one_plan(source, target, axes[-size:], sign, _DIRECT)
            if run is not None:
                return self._after(run, target, axes[:-size], sign)
        return self._after(self._one_axis(source, target, axes[-1], sign), target, axes[:-1], sign)

    def _after(self, first: Run, target: XArray, axes: tuple[int, ...], sign: int) -> Run:
        if not axes:
            return first
        rest = self._along(target, target, axes, sign)

        def run(source: XArray, target: XArray) -> None:
            first(source, target)
            rest(target, target)

        return run

    def _one_axis(
        self, source: XArray, target: XArray, axis: int, sign: int, *, half: bool = False
    ) -> Run:
        """Transform along one axis; if necessary through work arrays with this axis innermost."""
        inner = (*(k for k in range(source.ndim) if k != axis), axis)
        orders = (*_orders(source), (inner, inner))
        run = self._by_one_plan(source, target, (axis,), sign, orders, half=half)
        if run is None:
            raise DeviceError(
                f"cuFFT has no plan for lines of {target.shape[axis]} in arrays of {target.shape} elements; use more "
                "ranks"
            )
        return run

    def _by_one_plan(
        self,
        source: XArray,
        target: XArray,
        axes: tuple[int, ...],
        sign: int,
        orders: Sequence[tuple[Order, Order]],
        *,
        half: bool = False,
    ) -> Run | None:
        """Transform by launches of one plan, through the first pair of work arrays for which a plan exists.

        ``orders`` are pairs of memory orders for a work array in place of source and of target; None means no work
        array. Returns None if no pair has a plan, or if every plan needs too many small launches.
        """
        for before, after in orders:
            start = Form.of(source) if before is None else Form.contiguous(source, before)
            end = Form.of(target) if after is None else Form.contiguous(target, after)
            plan_launches = launches(start, end, axes, half=half)
            if plan_launches is None:
                continue
            bytes_each = math.prod(end.shape) * end.dtype.itemsize // len(plan_launches.starts)
            if len(plan_launches.starts) > _MOST_LAUNCHES and bytes_each < _LONG_LAUNCH_BYTES:
                continue
            run = self._runner(plan_launches, start.dtype, end.dtype, sign)
            return _through(run, self._work_array(source, before), self._work_array(target, after))
        return None

    def _work_array(self, array: XArray, order: Order) -> XArray | None:
        """Return a work array with the shape of ``array`` and a memory order of axes; None without an order."""
        if order is None:
            return None
        key = tuple(array.shape[k] for k in order), array.dtype
        if key not in self._work:
            self._work[key] = self.empty(*key)
        work: XArray = self._work[key].transpose(np.argsort(order).tolist())
        return work

    def _runner(self, plan_launches: PlanLaunches, source: DType, target: DType, sign: int) -> Run:
        if is_capturing():
            raise StateError(
                "the current stream is being captured, and making a plan of cuFFT needs the host; make the first call "
                "with arrays of this layout before the capture"
            )
        key = plan_launches.arguments, source, target
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = _plan(plan_launches.arguments, source, target)
        if plan_launches.starts == [(0, 0)]:

            def run(source: XArray, target: XArray) -> None:
                plan.fft(source, target, sign)

            return run
        steps = [(i * source.itemsize, o * target.itemsize) for i, o in plan_launches.starts]

        def run_all(source: XArray, target: XArray) -> None:
            start, end = source.data.ptr, target.data.ptr
            for i, o in steps:
                plan.fft(_At(start + i), _At(end + o), sign)

        return run_all


def _plan(arguments: tuple[Any, ...], source: DType, target: DType) -> Any:
    """Make a cuFFT plan with 32-bit or 64-bit indices from the arguments of `launches`."""
    cufft = cupy().cuda.cufft
    shape, inembed, istride, idist, onembed, ostride, odist, batch = arguments
    numbers = (*shape, *inembed, istride, idist, *onembed, ostride, odist, batch)
    pair = source if source.kind == "c" else target
    # Elements that the plan spans in both arrays.
    boxes = (math.prod((*embed[1:], shape[0], batch)) for embed in (inembed, onembed))
    options = {"order": "C", "last_axis": len(shape) - 1, "last_size": None}
    if max(*numbers, *boxes) > _LARGEST:
        return cufft.XtPlanNd(
            list(shape),
            *(list(inembed), istride, idist, source.char),
            *(list(onembed), ostride, odist, target.char),
            *(batch, pair.char),
            **options,
        )
    letters = {"f": "R", "d": "D", "F": "C", "D": "Z"}
    kind = getattr(cufft, f"CUFFT_{letters[source.char]}2{letters[target.char]}")
    return cufft.PlanNd(
        list(shape),
        *(list(inembed), istride, idist, list(onembed), ostride, odist, kind, batch),
        **options,
    )


def _orders(source: XArray) -> tuple[tuple[Order, Order], ...]:
    """Return the orders for no work array, and for a contiguous work array in place of source or of target."""
    natural = tuple(range(source.ndim))
    return (*_DIRECT, (natural, None), (None, natural))


def _through(run: Run, before: XArray | None, after: XArray | None) -> Run:
    """Return a transform with copies to and from work arrays; None means no work array."""
    if before is None and after is None:
        return run

    def through(source: XArray, target: XArray) -> None:
        if before is not None:
            before[...] = source
        run(source if before is None else before, target if after is None else after)
        if after is not None:
            target[...] = after

    return through


def launches(
    source: Form, target: Form, axes: tuple[int, ...], *, half: bool = False
) -> PlanLaunches | None:
    """Return the arguments of a cuFFT plan for some axes, and the start offsets of its launches.

    With ``half`` the last of ``axes`` is halved in the complex array. Returns None if cuFFT cannot express the
    transform.

    Examples
    --------
    >>> whole = Form((8, 6, 4), (24, 4, 1), np.dtype("c16"), True)
    >>> launches(whole, whole, (0,))
    PlanLaunches(arguments=((8,), (8,), 24, 1, (8,), 24, 1, 24), starts=[(0, 0)])
    >>> launches(whole, whole, (1,)).starts[:3]
    [(0, 0), (24, 24), (48, 48)]
    """
    if not (source.aligned and target.aligned):
        return None
    extents = tuple(map(max, source.shape, target.shape)) if half else source.shape
    last = axes[-1]
    inner = [axis for axis in axes if extents[axis] > 1 or (half and axis == last)] or [last]
    if half and max(extents[axis] for axis in axes) == 0:
        return None
    inner.sort(key=lambda axis: (axis == last if half else 0, -source.strides[axis]))
    places = []
    for form in (source, target):
        embed = _embedding([form.strides[a] for a in inner], [form.shape[a] for a in inner])
        if embed is None:
            return None
        places.append(embed)
    batches: list[tuple[int, int, int]] = []
    others = [axis for axis in range(len(extents)) if axis not in axes and extents[axis] > 1]
    for axis in sorted(others, key=lambda a: -abs(target.strides[a])):
        n, i, o = extents[axis], source.strides[axis], target.strides[axis]
        if batches and batches[-1][1:] == (i * n, o * n):
            batches[-1] = (batches[-1][0] * n, i, o)
        else:
            batches.append((n, i, o))
    (inembed, istride), (onembed, ostride) = places
    # Batch lines that are neighbours in memory. If the lines are contiguous, batch as many lines as possible.
    chosen = (1, 1, 1)
    if batches:
        chosen = batches.pop() if ostride > 1 else batches.pop(batches.index(max(batches)))
    batch, idist, odist = chosen
    shape = tuple(extents[a] for a in inner)
    arguments = (shape, inembed, istride, idist, onembed, ostride, odist, batch)
    if min(*shape, *inembed, istride, idist, *onembed, ostride, odist, batch) < 1:
        return None
    starts = [(0, 0)]
    for n, i, o in batches:
        starts = [(a + k * i, b + k * o) for a, b in starts for k in range(n)]
    real = source if source.dtype.kind == "f" else target if target.dtype.kind == "f" else None
    if real is not None and any(pair[real is target] % 2 for pair in starts):
        return None
    return PlanLaunches(arguments, starts)


def _embedding(
    strides: Sequence[int], extents: Sequence[int]
) -> tuple[tuple[int, ...], int] | None:
    """Return the extents of the array that has these nested strides, and the innermost stride; None if not nested."""
    embed = [extents[0]]
    for outer, inner, extent in zip(strides, strides[1:], extents[1:], strict=False):
        if inner <= 0 or outer % inner or outer // inner < extent:
            return None
        embed.append(outer // inner)
    return tuple(embed), strides[-1]
