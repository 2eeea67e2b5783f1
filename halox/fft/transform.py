"""`FFT`, the distributed Fourier transform between fields of a grid and their spectra.

The constructor finds the stages (`halox.fft.stages`) and makes the grid of the spectra. The first call with fields of
a dtype and component shape makes a `Pipeline`, which every later call runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from halox.domain.domain import domain_of
from halox.errors import ClosedError, DecompositionError, FieldError, HaloxError
from halox.fft.cufft import CuFFT
from halox.fft.fields import PHYSICAL, TransformCall, TransformFields
from halox.fft.host_fft import HostTransforms
from halox.fft.modes import NORMS, padded, wavenumbers
from halox.fft.pipeline import Pipeline
from halox.fft.stages import Schedule, divide_stages, fewest_transposes, find_stages
from halox.grid import Grid
from halox.paths import requested_path
from halox.runtime.call_guard import Closing, short_errors, single_threaded
from halox.runtime.known_arrays import KnownArrays
from halox.values import as_entries, as_int, as_list, check_bool, shown

if TYPE_CHECKING:
    from mpi4py import MPI

    from halox.plans.report import Report
    from halox.runtime.array_types import XArray

_MAKING = "the making of an FFT"


class FFT(Closing):
    """Transforms fields of a grid to their spectra and back, along some or all axes.

    Parameters
    ----------
    grid : Grid, int or sequence of int
        The grid of the fields, with any division (slabs, pencils, blocks), extents and halo. For a shape, the transform
        makes a grid without halo, `physical`, in the division that takes the fewest transposes: slabs if possible, or
        else pencils.
    axes : int or sequence of int, optional
        Axes to transform; all by default.
    real : bool
        Whether physical fields are real. Their spectra have ``n // 2 + 1`` coefficients along the last axis in
        ``axes``.
    norm : {"backward", "ortho", "forward"}
        The direction that divides by the number of points, as in `numpy.fft`. With "ortho", both directions divide by
        its square root.
    dealias : bool
        Whether physical fields have 3/2 as many points, ``3 * n // 2``, along each transformed axis, to avoid aliasing
        in products of fields (the 3/2 rule). Spectra keep the resolution of ``grid``.
    path : str, optional
        The data path of the transposes; by default the path of ``grid``.
    comm, device
        Only with a shape: the ranks and the memory of the fields, as for `Grid`.

    Attributes
    ----------
    physical : Grid
        Grid of the physical fields. This is the argument ``grid``, or with ``dealias`` a finer grid with the same ranks
        per axis and the same halo. For a shape it is made, and closed, by the transform.
    grid : Grid
        Grid of the spectra. It has no halo, the axes in the order of the argument ``grid``, and the coefficients in the
        order of `numpy.fft`. Its division is the last division of the transform. Two transforms of one grid that differ
        only in ``norm`` and ``dealias`` have the same division, so each can use spectra of the other.
    axes : tuple of int
        Axes of the transform.
    real : bool
        Whether the physical fields are real.
    dealias : bool
        Whether the physical fields have 3/2 as many points along each axis.
    norm : str
        Direction that divides by the number of points, or "ortho".

    Raises
    ------
    DecompositionError
        If an axis is not an axis of the grid or is given twice, or a required division has fewer lines than ranks.
    MismatchError
        If ranks give different arguments, dtypes or components.
    PathError
        If no path has this name.
    DeviceError
        If an array is on another device than the grid's fields.
    ClosedError
        If the transform or a grid is closed.
    ExchangeTimeoutError
        If another rank does not make the matching call within ``HALOX_TIMEOUT`` seconds.

    Notes
    -----
    Collective over the grid's ranks. Axes that are whole on every rank need no communication. Transposes make the other
    axes whole: one for slabs, two for pencils, three for blocks. `repr` names another ``proc_shape`` that takes fewer.
    The first call of a direction with fields of a dtype and component shape makes work arrays and plans, which are
    kept.

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

    @short_errors
    def __init__(
        self,
        grid: Grid | int | Sequence[int],
        axes: int | Sequence[int] | None = None,
        *,
        real: bool = False,
        norm: str = "backward",
        dealias: bool = False,
        path: str | None = None,
        comm: MPI.Intracomm | None = None,
        device: Literal["auto", "cpu", "gpu"] = "auto",
    ) -> None:
        self._grids: list[Grid] = []  # grids that this object has made, and closes
        if (shape := as_int(grid) or as_list(grid)) is not None:
            grid = Grid(shape, halo=0, periodic=True, comm=comm, device=device)
            self._grids.append(grid)
        self._world = domain_of(grid, "; give one, or a grid_shape").world
        self._base: Grid = cast("Grid", grid)
        self._closed = False
        self._pipelines: dict[object, Pipeline] = {}
        self._engine: HostTransforms | CuFFT = (
            HostTransforms() if self._base.device_id is None else CuFFT()
        )

        def read() -> tuple[tuple[tuple[int, ...], bool, bool], dict[str, object]]:
            if shape is None and (comm is not None or device != "auto"):
                raise HaloxError("comm, device: the grid has its own; give them with a grid_shape")
            is_real = check_bool("real", real, DecompositionError)
            is_padded = check_bool("dealias", dealias, DecompositionError)
            if not isinstance(norm, str) or norm not in NORMS:
                raise DecompositionError(f"norm must be one of {NORMS}, got {shown(norm)}")
            numbers = _axes(axes, len(self._base.grid_shape))
            requested_path(path)
            return (numbers, is_real, is_padded), {
                "axes": numbers,
                "real": is_real,
                "norm": norm,
                "dealias": is_padded,
                "path": path,
            }

        with self._world.guard:
            self._world.begin("making an FFT")
            try:
                self.axes, self.real, self.dealias = self._world.attempt(
                    read, f"{_MAKING} of this grid", alike=True
                )
                self.norm = norm
                self._path = self._base.domain.division.path if path is None else path
                self._schedule = self._make_grids()
            except HaloxError:
                self._release()  # raised on all ranks
                raise
        self._fields = TransformFields(self.physical, self.grid, real=self.real)
        self._known: KnownArrays[tuple[TransformCall, Pipeline]] = KnownArrays()
        for side in (self.physical, self.grid):
            side.domain.layouts.register(self._known)

    def forward(self, u: object, out: object | None = None) -> Any:
        """Transform a physical field to its spectrum.

        Parameters
        ----------
        u : array
            A field of `physical`: float32 or float64 for a real transform, otherwise complex64 or complex128. It may
            have component axes. Its halo is not read.
        out : array, optional
            A field of `grid`, complex with the same precision and component axes. By default a new array is made.

        Returns
        -------
        array
            ``out``, or a new array of ``grid``.

        Raises
        ------
        FieldError
            If an array does not fit its grid or the transform, or ``out`` is read-only or shares memory with ``u``.
        StateError
            If the current stream is being captured, and either a path does not support capture or plans have to be
            made.

        Notes
        -----
        Collective; local if no axis of the transform is divided among ranks, and an error is then raised on its rank
        alone. Ordered with CuPy's current stream on a GPU. After a first call with the same arrays, the call can be
        captured in a CUDA graph if the paths of the transposes support capture.
        """
        return self._run("forward", u, out)

    def backward(self, s: object, out: object | None = None) -> Any:
        """Transform a spectrum, which is not changed, to the physical field.

        Parameters
        ----------
        s : array
            A field of `grid`, complex64 or complex128.
        out : array, optional
            A field of `physical` with the same precision and component axes, real for a real transform. Its halo is not
            changed. By default a new array with a zero halo is made.

        Returns
        -------
        array
            ``out``, or a new array of ``physical``.

        Notes
        -----
        Same errors, and same order with CuPy's current stream, as `forward`.
        """
        return self._run("backward", s, out)

    def wavenumbers(self, lengths: float | Sequence[float] | None = None) -> tuple[Any, ...]:
        """Return the wave numbers of this rank's coefficients, one array per axis, ready to broadcast; local.

        Parameters
        ----------
        lengths : float or one per axis, optional
            Lengths of the domain: wave numbers are multiplied by ``2 * pi / length``. Without lengths, the wave numbers
            are integers: 0, 1, ..., -2, -1, or 0 to ``n // 2`` along the halved axis.

        Returns
        -------
        tuple of ndarray
            float64 arrays on the grid's device, each with length 1 along all axes except its own. The wave numbers of
            axes that are not transformed are zero.

        Raises
        ------
        FieldError
            If ``lengths`` is not a positive number, or one positive number per axis.
        """
        self._check_open()
        shape, xp = self._base.grid_shape, self._base.xp
        scales = [1.0] * len(shape) if lengths is None else _scales(lengths, len(shape))
        arrays = []
        for axis, (n, owned, scale) in enumerate(zip(shape, self.grid.owned, scales, strict=True)):
            numbers = (
                wavenumbers(n, half=self.real and axis == self.axes[-1])[owned] * scale
                if axis in self.axes
                else np.zeros(owned.stop - owned.start)
            )
            numbers = numbers.reshape([-1 if k == axis else 1 for k in range(len(shape))])
            arrays.append(numbers if xp is np else xp.asarray(numbers))
        return tuple(arrays)

    def explain(self, *, backward: bool = False) -> tuple[Report, ...]:
        """Return the reports of a direction's transposes, in the order of their execution.

        Parameters
        ----------
        backward : bool
            Whether to report the transposes of `backward` instead of `forward`.

        Returns
        -------
        tuple of Report
            One for each transpose and each dtype and component shape; see `Plan.explain`. Empty before the first call
            of the direction.

        Notes
        -----
        Not collective.
        """
        return tuple(
            report
            for pipeline in self._pipelines.values()
            for report in pipeline.reports(forward=not backward)
        )

    @single_threaded
    def close(self) -> None:
        """Close the plans and the grids that the transform has made.

        Collective; repeated calls have no effect. Arrays stay valid. The user's grid stays open.
        """
        if not self._closed:
            self._release()

    def __repr__(self) -> str:
        """Return the shapes and divisions of both sides."""
        kind = "real" if self.real else "complex"
        sides = (
            f"{grid.grid_shape} on {grid.proc_shape} ranks" for grid in (self.physical, self.grid)
        )
        transposes = len(self._schedule.stages) - 1
        return (
            f"<halox.FFT {kind} {' to '.join(sides)}, axes {self.axes}, norm {self.norm!r}, "
            f"{transposes} transpose(s){self._advice(transposes)}"
            f"{', dealias' if self.dealias else ''}"
            f"{', closed' if self._closed else ''}>"
        )

    # Internal

    def _release(self) -> None:
        self._closed = True
        self._engine.close()
        self._pipelines.clear()
        for grid in reversed(self._grids):
            grid.close()
        self._grids.clear()

    def _make_grids(self) -> Schedule:
        """Make the grids of both sides, and return the stages between them; collective."""
        base, shape = self._base, self._base.grid_shape
        half = self.axes[-1] if self.real else None
        modes = tuple(n // 2 + 1 if axis == half else n for axis, n in enumerate(shape))
        self._fewest = cache(partial(fewest_transposes, shape, modes, base.size, self.axes, half))
        if base in self._grids and (best := self._fewest()) and best[0].parts != base.proc_shape:
            procs = best[0].parts
            base = self._new_grid(shape, halo=0, periodic=True, proc_shape=procs)
        stages = find_stages(shape, modes, base.proc_shape, self.axes, half)
        fine = tuple(
            padded(n) if self.dealias and axis in self.axes else n for axis, n in enumerate(shape)
        )
        self.physical: Grid = base
        if fine != shape:
            self.physical = self._new_grid(
                fine,
                halo=base.halo,
                periodic=base.periodic,
                corners=base.corners,
                path=base.domain.division.path,
                proc_shape=base.proc_shape,
                placement=base.domain.decomposition.placement,
            )
        divided = divide_stages(
            stages, self.physical.domain.decomposition, modes, half, turns=self._engine.turns
        )
        spectral = divided[-1].after
        self.grid: Grid = self._new_grid(
            spectral.grid_shape,
            halo=0,
            proc_shape=spectral.proc_shape,
            blocks=[axis.sizes for axis in spectral.axes],
            placement=spectral.placement,
        )
        return Schedule(divided, half, self.norm, shape, fine)

    def _advice(self, transposes: int) -> str:
        """Return the process grid that takes fewer transposes, if there is one."""
        best = self._fewest()
        if best is None or len(best) > transposes:
            return ""
        return f" ({len(best) - 1} with proc_shape={best[0].parts})"

    def _new_grid(self, shape: Sequence[int], **options: Any) -> Grid:
        base = self._base
        with nullcontext() if base.device_id is None else base.xp.cuda.Device(base.device_id):
            division = base.domain.division
            options["leave_sms"] = division.leave_sms
            options["reproducible"] = division.reproducible
            grid: Grid = Grid(shape, comm=base.comm, device=base.device, **options)
        self._grids.append(grid)
        return grid

    def _check_open(self) -> None:
        self._world.check_open()
        if self._closed:
            raise ClosedError(
                "the FFT is closed; make a new one, or call close() only after the last use"
            )

    @single_threaded
    def _run(self, direction: str, source: object, out: object | None) -> object:
        forward = direction == "forward"
        self._check_open()
        arrays = (source,) if out is None else (source, out)
        known = self._known.find(forward, arrays)
        if known is None:
            known = self._look_up(direction, source, out)
            self._known.keep(forward, arrays, known)
        call, pipeline = known
        fields = self._fields

        def views(target: object) -> tuple[XArray, XArray]:
            return fields.cells(source, call.source), fields.cells(target, call.target)

        def first() -> object:
            target = fields.new(forward, call) if out is None else out
            pipeline.bind(forward, *views(target))
            return target

        if forward in pipeline.ready:
            target = fields.new(forward, call) if out is None else out
        else:  # one rank alone can run out of memory
            target = self._world.attempt(first, direction)
        pipeline.ready.add(forward)
        self._world.guard.begin()
        self._engine.begin()
        pipeline.run(forward, *views(target))
        return target

    def _look_up(
        self, direction: str, source: object, out: object | None
    ) -> tuple[TransformCall, Pipeline]:
        """Check new arrays, and find their steps; collective if plans must be made or a check fails."""
        forward = direction == "forward"
        pipeline = None
        with suppress(HaloxError):
            call = self._fields.read(forward, source, out)
            pipeline = self._pipelines.get((call.dtype, call.components))
        if pipeline is None or not pipeline.has_plans(forward):
            call, pipeline = self._connect(direction, source, out)
        return call, pipeline

    def _connect(
        self, direction: str, source: object, out: object | None
    ) -> tuple[TransformCall, Pipeline]:
        """Compare the arguments of all ranks, and make the plans of a direction; collective."""
        forward = direction == "forward"

        def read() -> tuple[TransformCall, dict[str, object]]:
            call = self._fields.read(forward, source, out)
            return call, {"dtype": str(call.dtype), "components": call.components}

        self._world.begin(direction)
        call = self._world.attempt(read, direction, alike=True)
        key = call.dtype, call.components
        pipeline = self._pipelines.get(key)
        if pipeline is None:
            pipeline = Pipeline(
                self._schedule,
                self.grid.domain,
                self._engine,
                call.dtype,
                PHYSICAL[call.dtype] if self.real else None,
                sum(call.components, ()),
            )
        if not pipeline.has_plans(forward):
            pipeline.connect(forward, self._path)
        self._pipelines[key] = pipeline
        return call, pipeline


def _axes(axes: object, ndim: int) -> tuple[int, ...]:
    """Return axes as a tuple; raise `DecompositionError` for an invalid or repeated axis."""
    entries = range(ndim) if axes is None else as_entries(axes)
    numbers = [as_int(axis) for axis in entries]
    found = [axis % ndim for axis in numbers if axis is not None and -ndim <= axis < ndim]
    if not found or len({*found}) != len(numbers):
        raise DecompositionError(
            f"axes: expected some of the grid axes 0 to {ndim - 1}, each once, got {shown(axes)}"
        )
    return tuple(found)


def _scales(lengths: object, ndim: int) -> list[float]:
    try:
        numbers = np.broadcast_to(np.array(lengths, float), ndim).tolist()
    except (TypeError, ValueError, OverflowError):
        numbers = []
    if not numbers or not all(0 < n < math.inf for n in numbers):
        raise FieldError(
            f"lengths: expected a number > 0, or one per grid axis ({ndim}), got {shown(lengths)}"
        )
    return [2 * math.pi / n for n in numbers]
