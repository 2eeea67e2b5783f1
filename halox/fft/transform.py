"""The distributed Fourier transform: a field of a grid to its spectrum, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from halox.errors import ClosedError, DecompositionError, FieldError, HaloxError
from halox.exchange.selection import wished_path
from halox.fft.fields import PHYSICAL, Call, Fields, KnownCalls
from halox.fft.modes import NORMS, wavenumbers
from halox.fft.pipeline import Pipeline
from halox.fft.route import RouteMaker
from halox.fft.stages import Stage, find_stages
from halox.grid import Grid
from halox.runtime.call_guard import Closing, one_thread
from halox.runtime.gpu.cufft import CuFFT
from halox.runtime.host_fft import HostTransforms
from halox.transpose import Transpose
from halox.values import as_int, as_list, check_bool, shown

if TYPE_CHECKING:
    from halox.runtime.array_types import XArray

_MAKING = "the making of an FFT"


class FFT(Closing):
    """Transforms fields of a grid along some or all axes, forward to their spectra and backward.

    Parameters
    ----------
    grid : Grid
        Any division (slabs, pencils, blocks), extents and halo.
    axes : int or sequence of int, optional
        Axes to transform; all by default.
    real : bool
        Whether physical fields are real. Their spectra have ``n // 2 + 1`` coefficients along the last of ``axes``.
    norm : {"backward", "ortho", "forward"}
        The direction that divides by the number of points, as in `numpy.fft`; "ortho" is both, by its square root.
    dealias : bool
        Whether physical fields have 3/2 as many points along each transformed axis, ``3 * n // 2``, as products of
        fields need (the 3/2 rule). Spectra have the resolution of ``grid``.
    path : str, optional
        The data path of the transposes, by default that of ``grid``.

    Attributes
    ----------
    physical : Grid
        Of the physical fields: ``grid``, unless ``dealias`` makes a finer one, with as many ranks and the same halo.
    grid : Grid
        Of the spectra: no halo, the axes in the order of ``grid``, the coefficients in the order of `numpy.fft`.
        Its division is the last of the transform; two transforms of one grid that differ in ``norm`` and ``dealias``
        alone have the same, and may exchange spectra.
    axes : tuple of int
        Axes of the transform.
    real : bool
        Whether the physical fields are real.
    dealias : bool
        Whether the physical fields have 3/2 as many points along each axis.
    norm : str
        Direction that divides by the number of points.

    Raises
    ------
    DecompositionError
        If ``axes`` are none of the grid's or named twice, or a division that is needed has fewer lines than ranks.
    MismatchError
        If ranks give different arguments.
    PathError
        If there is no such path.
    ClosedError
        If the grid is closed.

    Notes
    -----
    Collective over the grid's ranks. On one rank, and along axes that are whole on every rank, there is no
    communication. The other axes are made whole by transposes: one for slabs, two for pencils, three for blocks. Work
    arrays and plans are made at the first call with fields of a dtype and components, and kept.

    Examples
    --------
    >>> import halox
    >>> grid = halox.Grid((8, 6), halo=1, periodic=True, device="cpu")
    >>> u = grid.ones("f8")
    >>> with halox.FFT(grid, real=True) as fft:
    ...     s = fft.forward(u)
    ...     kx, ky = fft.wavenumbers()
    ...     s *= 1 + kx**2 + ky**2
    ...     v = fft.backward(s)
    >>> s.shape, s[0, 0], float(grid.max(abs(v - u)))
    ((8, 4), np.complex128(48+0j), 0.0)
    >>> grid.close()
    """

    def __init__(
        self,
        grid: Grid,
        axes: int | Sequence[int] | None = None,
        *,
        real: bool = False,
        norm: str = "backward",
        dealias: bool = False,
        path: str | None = None,
    ) -> None:
        if not isinstance(grid, Grid):
            raise HaloxError(f"grid must be a halox.Grid, got {type(grid).__name__}")
        self._base, self._world = grid, grid._world
        self._closed = False
        self._made: list[Grid | Transpose] = []
        self._pipelines: dict[object, Pipeline] = {}
        self._engine: HostTransforms | CuFFT = (
            HostTransforms() if grid.device_id is None else CuFFT()
        )

        def check() -> tuple[tuple[int, ...], bool, bool, list[Stage]]:
            is_real = check_bool("real", real, DecompositionError)
            is_padded = check_bool("dealias", dealias, DecompositionError)
            if not isinstance(norm, str) or norm not in NORMS:
                raise DecompositionError(f"norm must be one of {NORMS}, got {shown(norm)}")
            numbers = _axes(axes, len(grid.grid_shape))
            wished_path(path)
            half = numbers[-1] if is_real else None
            shape = grid.grid_shape
            modes = [n // 2 + 1 if axis == half else n for axis, n in enumerate(shape)]
            return (
                numbers,
                is_real,
                is_padded,
                find_stages(shape, modes, grid.proc_shape, numbers, half),
            )

        with self._world.guard:
            self._world.begin("making an FFT")
            self.axes, self.real, self.dealias, stages = self._world.guarded(
                check, f"{_MAKING} of this grid"
            )
            self.norm = norm
            mine = {
                "axes": self.axes,
                "real": self.real,
                "norm": norm,
                "dealias": self.dealias,
                "path": path,
            }
            self._world.compare(mine, _MAKING)
            maker = RouteMaker(grid)
            self._made = maker.made
            try:
                self._route = maker.make(
                    stages,
                    self.axes,
                    half=self.axes[-1] if self.real else None,
                    norm=norm,
                    dealias=self.dealias,
                    path=grid._path if path is None else path,
                    turns=self._engine.turns,
                )
            except HaloxError:
                self._release()  # an error of all ranks
                raise
        self.physical: Grid = self._route.stages[0].before
        self.grid: Grid = self._route.stages[-1].after
        self._fields = Fields(self.physical, self.grid, real=self.real)
        self._calls: KnownCalls[tuple[Call, Pipeline]] = KnownCalls()
        for side in (self.physical, self.grid):
            side._layouts.watch(self._calls)

    def forward(self, u: object, out: object | None = None) -> Any:
        """Transform a physical field to its spectrum.

        Parameters
        ----------
        u : array
            Of `physical`: float32 or float64 for a real transform, complex64 or complex128 for others. Its halo is
            not read. May have component axes.
        out : array, optional
            Of `grid`, complex of the same precision, with the same component axes; a new one by default.

        Returns
        -------
        array
            ``out``, or a new array of ``grid``.

        Raises
        ------
        FieldError
            If an array does not fit its grid or the transform, or ``out`` is read-only or shares memory with ``u``.
        DeviceError
            If an array is on another device than the grid's fields.
        MismatchError
            If ranks give different dtypes or components.
        StateError
            If the current stream is being captured, and a path cannot be, or plans have to be made.
        ClosedError
            If the transform or a grid is closed.
        ExchangeTimeoutError
            If another rank does not come within ``HALOX_TIMEOUT`` seconds.

        Notes
        -----
        Collective. Ordered with CuPy's current stream on a GPU; can be captured in a CUDA graph after a first call with
        the same arrays, where the paths of the transposes can.
        """
        return self._run("forward", u, out)

    def backward(self, s: object, out: object | None = None) -> Any:
        """Transform a spectrum, which is not changed, to the physical field.

        Parameters
        ----------
        s : array
            Of `grid`, complex64 or complex128.
        out : array, optional
            Of `physical`, real for a real transform, of the same precision, with the same component axes. Its halo
            is left alone. A new one by default, with a halo of zeros.

        Returns
        -------
        array
            ``out``, or a new array of ``physical``.

        Notes
        -----
        Errors and order as of `forward`.
        """
        return self._run("backward", s, out)

    def wavenumbers(self, lengths: float | Sequence[float] | None = None) -> tuple[Any, ...]:
        """Return the wave numbers of this rank's coefficients, one array an axis, ready to broadcast; local.

        Parameters
        ----------
        lengths : float or one per axis, optional
            Lengths of the domain: wave numbers are multiplied by ``2 * pi / length``. Without them they are integers:
            0, 1, ..., -2, -1, or 0 to ``n // 2`` along the halved axis.

        Returns
        -------
        tuple of ndarray
            float64, on the grid's device; the shape is 1 along all axes but one. Zeros for axes that are not
            transformed.

        Raises
        ------
        FieldError
            If ``lengths`` are not one positive number, or one per axis.
        """
        self._check_open()
        shape, xp = self._base.grid_shape, self._base.xp
        scales = [1.0] * len(shape) if lengths is None else _scales(lengths, len(shape))
        found = []
        for axis, (n, owned, scale) in enumerate(zip(shape, self.grid.owned, scales, strict=True)):
            numbers = (
                wavenumbers(n, half=self.real and axis == self.axes[-1])[owned] * scale
                if axis in self.axes
                else np.zeros(owned.stop - owned.start)
            )
            numbers = numbers.reshape([-1 if k == axis else 1 for k in range(len(shape))])
            found.append(numbers if xp is np else xp.asarray(numbers))
        return tuple(found)

    @one_thread
    def close(self) -> None:
        """Close the transposes and the grids that the transform has made.

        Collective, and harmless when repeated. Arrays stay valid; ``grid`` given by the user stays open.
        """
        if not self._closed:
            self._release()

    def __repr__(self) -> str:
        """Return the shapes and divisions of both sides."""
        kind = "real" if self.real else "complex"
        sides = (
            f"{grid.grid_shape} on {grid.proc_shape} ranks" for grid in (self.physical, self.grid)
        )
        return (
            f"<halox.FFT {kind} {' to '.join(sides)}, axes {self.axes}, norm {self.norm!r}, "
            f"{len(self._route.transposes)} transpose(s){', dealias' if self.dealias else ''}"
            f"{', closed' if self._closed else ''}>"
        )

    # Internal

    def _release(self) -> None:
        self._closed = True
        self._engine.close()
        self._pipelines.clear()
        for one in reversed(self._made):
            one.close()
        self._made.clear()

    def _check_open(self) -> None:
        self._base._world.check_open()
        if self._closed:
            raise ClosedError(
                "the FFT is closed; make a new one, or call close() only after the last use"
            )

    @one_thread
    def _run(self, direction: str, source: object, out: object | None) -> object:
        forward = direction == "forward"
        self._check_open()
        known = self._calls.find(forward, source, out)
        if known is None:
            known = self._look_up(direction, source, out)
        call, pipeline = known
        fields = self._fields

        def views(target: object) -> tuple[XArray, XArray]:
            return fields.cells(source, call.source), fields.cells(target, call.target)

        def first() -> object:
            target = fields.new(forward, call) if out is None else out
            pipeline.bind(forward, *views(target))
            return target

        if pipeline.is_new:  # memory can run out on one rank alone
            target = self._world.guarded(first, direction)
        else:
            target = fields.new(forward, call) if out is None else out
        self._world.guard.has_begun = True
        self._engine.begin()
        pipeline.run(forward, *views(target))
        return target

    def _look_up(self, direction: str, source: object, out: object | None) -> tuple[Call, Pipeline]:
        """Check arrays that are new, and find their steps; collective where these must be made, or a check fails."""
        forward = direction == "forward"
        pipeline = None
        with suppress(HaloxError):
            call = self._fields.read(forward, source, out)
            pipeline = self._pipelines.get((call.dtype, call.components))
        if pipeline is None:
            # That of the transpose which ranks whose arrays are known run first: so both sides find that calls differ.
            moves = self._route.transposes[:: 1 if forward else -1]
            world = moves[0].grid_a._world if moves else self._world
            world.begin(direction)
            call, _ = world.prepare(
                lambda: (self._fields.read(forward, source, out), None), direction
            )
            mine = {"dtype": str(call.dtype), "components": call.components}
            world.compare(mine, direction)
            pipeline = self._pipelines.get((call.dtype, call.components))
        if pipeline is None:
            pipeline = Pipeline(
                self._route,
                self._engine,
                self._base.xp,
                call.dtype,
                PHYSICAL[call.dtype] if self.real else None,
                sum(call.components, ()),
            )
            self._pipelines[call.dtype, call.components] = pipeline
        self._calls.add(forward, source, out, (call, pipeline))
        return call, pipeline


def _axes(axes: object, ndim: int) -> tuple[int, ...]:
    """Return axes as a tuple; raise `DecompositionError` for what is none of the grid's, or twice."""
    if axes is None:
        return tuple(range(ndim))
    one = as_int(axes)
    entries = [one] if one is not None else [as_int(axis) for axis in as_list(axes) or ()]
    numbers = tuple(axis + ndim if axis < 0 else axis for axis in entries if axis is not None)
    if (
        not entries
        or len(numbers) != len(entries)
        or len(set(numbers)) != len(numbers)
        or not all(0 <= axis < ndim for axis in numbers)
    ):
        raise DecompositionError(
            f"axes: expected some of the grid axes 0 to {ndim - 1}, each once, got {shown(axes)}"
        )
    return numbers


def _scales(lengths: object, ndim: int) -> list[float]:
    entries = as_list(lengths)
    entries = [lengths] * ndim if entries is None else entries
    try:
        numbers = [float(entry) for entry in entries]
    except Exception:  # an object may raise anything
        numbers = []
    if len(numbers) != ndim or not all(math.isfinite(n) and n > 0 for n in numbers):
        raise FieldError(
            f"lengths: expected a number > 0, or one per grid axis ({ndim}), got {shown(lengths)}"
        )
    return [2 * math.pi / n for n in numbers]
