"""The distributed Fourier transform: a field of a grid to its spectrum, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from halox.decomposition import FieldLayout
from halox.errors import ClosedError, DecompositionError, DeviceError, FieldError, HaloxError
from halox.exchange.selection import wished_path
from halox.fft.modes import NORMS, padded, wavenumbers
from halox.fft.pipeline import GridStage, Pipeline, Route
from halox.fft.stages import Stage, find_stages, moved_placement, turned_placement
from halox.grid import Grid
from halox.runtime.arrays import Described, DType, as_ndarray, describe, share_memory
from halox.runtime.call_guard import one_thread
from halox.runtime.gpu.cufft import CuFFT
from halox.runtime.gpu.devices import allocate, as_device_array
from halox.runtime.host_fft import HostTransforms
from halox.transpose import Transpose
from halox.values import as_int, as_list, check_bool, shown

_MAKING = "the making of an FFT"
_COMPLEX = {np.dtype(real): np.dtype(pair) for real, pair in (("f4", "c8"), ("f8", "c16"))}
_REAL = {pair: real for real, pair in _COMPLEX.items()}


class FFT:
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
    real, dealias : bool
    norm : str

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
        self._world.begin("making an FFT")

        def check() -> tuple[tuple[int, ...], bool, bool, list[Stage]]:
            is_real = check_bool("real", real, DecompositionError)
            is_padded = check_bool("dealias", dealias, DecompositionError)
            if norm not in NORMS:
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
            self.axes, self.real, self.dealias, stages = self._world.guarded(check, _MAKING)
            self.norm = norm
            mine = {
                "axes": self.axes,
                "real": self.real,
                "norm": norm,
                "dealias": self.dealias,
                "path": path,
            }
            self._world.compare(mine, _MAKING)
            self._path = grid._path if path is None else path
            try:
                self._build(stages)
            except HaloxError:
                self._release()  # an error of all ranks
                raise
        self.physical: Grid = self._physical
        self.grid: Grid = self._route.stages[-1].after

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
            numbers.shape = tuple(-1 if k == axis else 1 for k in range(len(shape)))
            found.append(numbers if xp is np else xp.asarray(numbers))
        return tuple(found)

    @one_thread
    def close(self) -> None:
        """Close the transposes and the grids that the transform has made.

        Collective, and harmless when repeated. Arrays stay valid; ``grid`` given by the user stays open.
        """
        if not self._closed:
            self._release()

    def __enter__(self) -> FFT:
        """Return the transform."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Close it, unless an error is on its way: other ranks may not take part then."""
        if kind is None:
            self.close()

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

    def _build(self, stages: list[Stage]) -> None:
        """Make the grids and the transposes of all stages; collective."""
        base = self._base
        shape = base.grid_shape
        half = self.axes[-1] if self.real else None
        fine = tuple(
            padded(n) if self.dealias and axis in self.axes else n for axis, n in enumerate(shape)
        )
        modes = tuple(n // 2 + 1 if axis == half else n for axis, n in enumerate(shape))
        self._physical = base
        if fine != shape:
            self._physical = self._grid(
                fine,
                halo=base.halo,
                periodic=base.periodic,
                corners=base.corners,
                path=base._path,
                proc_shape=base.proc_shape,
                placement=base._decomposition.placement,
            )
        natural = tuple(range(len(shape)))
        current, placement = self._physical, base._decomposition.placement
        sizes = [axis.sizes for axis in current._decomposition.axes]
        order, cells = natural, list(fine)
        found: list[GridStage] = []
        transposes: list[Transpose] = []
        for number, stage in enumerate(stages):
            last = number == len(stages) - 1
            if number:
                placement = moved_placement(placement, stage.moves)
                for axis in natural:
                    if stage.parts[axis] != stages[number - 1].parts[axis]:
                        sizes[axis] = _even(cells[axis], stage.parts[axis])
                order = natural if last else self._order(stage.axes)
                before = self._stage_grid(cells, sizes, order, placement)
                previous = found[-1]
                axes = tuple(previous.order.index(axis) for axis in order)
                transpose = Transpose(previous.after, before, axes=axes, path=self._path)
                self._made.append(transpose)
                transposes.append(transpose)
            else:
                before = current
            after = before
            for axis in stage.axes:
                cells[axis] = modes[axis]
                sizes[axis] = (cells[axis],)
            if number == 0 or [cells[axis] for axis in order] != list(before.grid_shape):
                after = self._stage_grid(cells, sizes, order, placement)
            done = tuple(axis for axis in stage.axes if axis != half)
            if half in stage.axes:
                done = (*done, half)
            found.append(GridStage(before, after, order, done))
        points = tuple(shape)
        self._route = Route(found, transposes, half, self.norm, points, fine)

    def _order(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the order of the axes in which some are transformed best: innermost, for an engine that wishes so."""
        natural = tuple(range(len(self._base.grid_shape)))
        if not self._engine.turns or axes == natural[: len(axes)]:
            return natural
        return (*(axis for axis in natural if axis not in axes), *axes)

    def _stage_grid(
        self,
        cells: Sequence[int],
        sizes: Sequence[Sequence[int]],
        order: tuple[int, ...],
        placement: Any,
    ) -> Grid:
        placement = turned_placement(placement, order)
        return self._grid(
            [cells[axis] for axis in order],
            halo=0,
            proc_shape=placement.proc_shape,
            blocks=[sizes[axis] for axis in order],
            placement=placement,
        )

    def _grid(self, shape: Sequence[int], **options: Any) -> Grid:
        base = self._base
        with nullcontext() if base.device_id is None else base.xp.cuda.Device(base.device_id):
            grid = Grid(shape, comm=base.comm, device=base.device, **options)
        self._made.append(grid)
        return grid

    def _release(self) -> None:
        self._closed = True
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
    def _run(self, direction: str, source: object, out: object | None) -> Any:
        forward = direction == "forward"
        try:
            dtype, layout, target = self._read(forward, source, out)
            pipeline = self._pipelines.get((dtype, _components(layout)))
        except HaloxError:
            pipeline = None
        if pipeline is None:
            pipeline, layout, target = self._prepare(direction, source, out)
            dtype = pipeline.complex_dtype
        if out is None:
            out = self._new(forward, dtype, target)
        array = as_ndarray if self._base.device_id is None else as_device_array
        pipeline.run(forward, _cells(array(source), layout), _cells(array(out), target))
        return out

    def _prepare(
        self, direction: str, source: object, out: object | None
    ) -> tuple[Pipeline, FieldLayout, FieldLayout]:
        """Make the steps for fields of a dtype and components; collective. Raises errors on all ranks."""
        world = self._world
        self._check_open()
        world.begin(direction)
        forward = direction == "forward"

        def build() -> tuple[tuple[DType, FieldLayout, FieldLayout], None]:
            return self._read(forward, source, out), None

        (dtype, layout, target), _ = world.prepare(build, direction)
        components = _components(layout)
        world.compare({"dtype": str(dtype), "components": components}, direction)
        key = dtype, components
        pipeline = self._pipelines.get(key)
        if pipeline is None:
            real = _REAL[dtype] if self.real else None
            xp = self._base.xp
            pipeline = Pipeline(self._route, self._engine, xp, dtype, real, sum(components, ()))
            self._pipelines[key] = pipeline
        return pipeline, layout, target

    def _read(
        self, forward: bool, source: object, out: object | None
    ) -> tuple[DType, FieldLayout, FieldLayout]:
        """Check what one rank can see alone; return the spectral dtype and both layouts."""
        self._check_open()
        grids = (self.physical, self.grid) if forward else (self.grid, self.physical)
        names = ("u", "out") if forward else ("s", "out")
        found = describe(source, names[0])
        layout = self._layout(grids, source, found, names[0], forward)
        dtype = self._check_dtype(found.dtype, names[0], is_real=self.real and forward)
        spec = layout.spec
        if out is None:
            target = grids[1]._layouts.of(
                type(spec)(grids[1].halo, spec.components_before, spec.components_after)
            )
            return dtype, layout, target
        given = describe(out, names[1])
        target = self._layout(grids[::-1], out, given, names[1], not forward)
        wanted = _REAL[dtype] if self.real and not forward else dtype
        if given.dtype != wanted:
            raise FieldError(
                f"out has dtype {given.dtype}, and the transform of {found.dtype} gives {wanted}; give an array of that"
            )
        if _components(target) != _components(layout):
            raise FieldError(
                f"out has the component axes {_components(target)}, before and after the grid axes, {names[0]} "
                f"{_components(layout)}; give both the same"
            )
        if not given.writable:
            raise FieldError("out is read-only; its cells cannot be set")
        if share_memory(found, given):
            raise FieldError(
                f"{names[0]} and out share memory, and cells would be overwritten before they are read; give two "
                "arrays apart"
            )
        return dtype, layout, target

    def _layout(
        self, grids: Sequence[Grid], array: object, found: Described, name: str, physical: bool
    ) -> FieldLayout:
        """Return the layout of an array of the first of two grids."""
        mine, other = (grid._layouts for grid in grids)
        sides = ("physical", "grid") if physical else ("grid", "physical")
        wish = f"{name} must be a field of fft.{sides[0]}"
        if other.knows(array, found) and not mine.knows(array, found):
            raise FieldError(
                f"{wish}, and is one of fft.{sides[1]}; forward transforms fields of fft.physical to such of fft.grid, "
                f"backward the other way; make one with fft.{sides[0]}.zeros"
            )
        try:
            layout = mine.find(array)
        except (FieldError, DeviceError) as error:
            raise type(error)(f"{wish}: {error}") from error
        if any(layout.spec.staggered):
            raise FieldError(
                f"{wish}, and is staggered: its points are not those of the cells; give a field that is not"
            )
        if layout.spec.parity is not None:
            raise FieldError(
                f"{wish}, and has {layout.spec.parity} cells only; give a field of all cells"
            )
        return layout

    def _check_dtype(self, dtype: DType, name: str, *, is_real: bool) -> DType:
        """Return the spectral dtype of a field's dtype."""
        allowed = list(_COMPLEX if is_real else _REAL)
        if dtype in allowed:
            return _COMPLEX.get(dtype, dtype)
        words = " or ".join(map(str, allowed))
        remedy = f"convert it by {name}.astype"
        if is_real and dtype.kind == "c":
            remedy = "make the FFT with real=False, or give the real part"
        elif not is_real and dtype in _COMPLEX and not self.real:
            remedy = "make the FFT with real=True, or give a complex field"
        raise FieldError(
            f"{name} has dtype {dtype}, and this {'real' if self.real else 'complex'} transform takes {words} there; "
            f"{remedy}"
        )

    def _new(self, forward: bool, dtype: DType, layout: FieldLayout) -> Any:
        """Allocate a result; local."""
        grid = self.grid if forward else self.physical
        found = dtype if forward or not self.real else _REAL[dtype]
        try:
            array = allocate(layout.padded_shape, found, grid.device_id)
        except MemoryError as error:
            raise HaloxError(
                f"no memory for a field of shape {layout.padded_shape} and dtype {found} ({error}); use more ranks, or "
                "give out="
            ) from error
        if any(map(any, grid.halo)):
            array[...] = 0
        grid.declare(array, **_options(layout))
        return array


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


def _even(cells: int, parts: int) -> tuple[int, ...]:
    size, extra = divmod(cells, parts)
    return tuple(size + (part < extra) for part in range(parts))


def _components(layout: FieldLayout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return layout.spec.components_before, layout.spec.components_after


def _options(layout: FieldLayout) -> dict[str, Any]:
    before, after = _components(layout)
    return {"components": before, "components_after": after, "halo": layout.spec.halo}


def _cells(array: Any, layout: FieldLayout) -> Any:
    """View the owned cells of an array, component axes in front."""
    cells = array[layout.interior]
    if not layout.spec.components_after:
        return cells
    first, ndim = len(layout.spec.components_before), layout.spec.ndim
    behind = range(first + ndim, cells.ndim)
    return cells.transpose(*range(first), *behind, *range(first, first + ndim))
