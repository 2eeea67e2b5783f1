"""Transpose: copies a field between two divisions of the same grid."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from halox.decomposition import FieldLayout
from halox.domain import Domain
from halox.domain.domain import domain_of
from halox.errors import ClosedError, DeviceError, FieldError, MismatchError
from halox.grid import Grid
from halox.paths import requested_path
from halox.plans.cache import Key, PlanCache
from halox.plans.draft import Draft
from halox.plans.making import make_domain_plan
from halox.plans.plan import Plan
from halox.plans.runner import Runner
from halox.plans.transpose import (
    check_same_field,
    check_same_grid,
    common_axes,
    memory_order,
    normalise_axes,
    transpose_draft,
    transpose_ends,
)
from halox.runtime.arrays import describe, share_memory
from halox.runtime.call_guard import Closing, short_errors, single_threaded
from halox.values import as_bool

_MAKING = "the making of a transpose"


class Transpose(Closing):
    """Copies fields between two grids that divide the same cells differently: slabs, pencils, blocks.

    Parameters
    ----------
    grid_a, grid_b : Grid
        Grids over the same ranks in the same order, on the same device. Their process grids, blocks, halos and
        periodicity may differ.
    axes : sequence of int, optional
        Axis ``k`` of ``grid_b`` is axis ``axes[k]`` of ``grid_a``, as in `numpy.transpose`; the same order by default.
        With ``axes=(0, 2, 1)``, grids of shapes (nx, ny, nz) and (nx, nz, ny) hold the same cells, and a C-ordered
        array of ``grid_b`` has y contiguous.
    path : str, optional
        The data path of all messages to other ranks; by default the path of ``grid_a``.

    Raises
    ------
    MismatchError
        If the grids are not over the same ranks in the same order, or ranks give different arguments, dtypes or
        layouts.
    DecompositionError
        If the grids do not have the same cells, or ``axes`` is not a permutation of the axes.
    DeviceError
        If one grid is on the host and one on a GPU, the grids are on different GPUs, or an array is on another device.
    PathError
        If no path has this name. If the path cannot be used on this machine, the calls raise the error.
    ClosedError
        If the transpose or a grid is closed.
    ExchangeTimeoutError
        If another rank does not make the matching call within ``HALOX_TIMEOUT`` seconds.

    Notes
    -----
    Collective over the grids' ranks. Closing either grid closes the plans of the transpose, so keep both grids open
    while the transpose is used. A call of the transpose counts as a call of ``grid_a``, which only one thread at a time
    may make. Errors are raised on all ranks or on none.

    Examples
    --------
    >>> import halox
    >>> rows = halox.Grid((4, 6), halo=0, device="cpu")
    >>> columns = halox.Grid((6, 4), halo=1, device="cpu")
    >>> u, v = rows.full(2.5), columns.zeros()
    >>> with halox.Transpose(rows, columns, axes=(1, 0)) as transpose:
    ...     transpose.forward(u, v)
    >>> rows.sum(u) == columns.sum(v), v.shape
    (np.True_, (8, 6))
    >>> columns.close(), rows.close()
    (None, None)
    """

    @short_errors
    def __init__(
        self,
        grid_a: Grid,
        grid_b: Grid,
        *,
        axes: Sequence[int] | None = None,
        path: str | None = None,
    ) -> None:
        self.grid_a, self.grid_b = grid_a, grid_b
        self.domain_a = a = domain_of(grid_a, name="grid_a")
        self._path = path
        self._closed = False
        self._world = a.world

        def check() -> tuple[tuple[Domain, tuple[int, ...]], dict[str, object]]:
            b = domain_of(grid_b, name="grid_b")
            b.world.check_open()
            _check_ranks(a, b)
            _check_devices(a, b)
            order = normalise_axes(axes, a.decomposition.ndim)
            check_same_grid(a.decomposition, b.decomposition, order)
            requested_path(path)
            of_b = b.decomposition
            return (b, order), {
                "axes": order,
                "path": path,
                "proc_shape of grid_b": of_b.proc_shape,
                "blocks of grid_b": tuple(axis.bounds for axis in of_b.axes),
                "placement of grid_b": of_b.placement.shown,
            }

        with self._world.guard:
            self._world.begin("making a Transpose")
            self.domain_b, self.axes = self._world.attempt(
                check, f"{_MAKING} from grid_a", alike=True
            )
        layouts_a, layouts_b = self.domain_a.layouts, self.domain_b.layouts

        def key(arrays: tuple[object, ...]) -> Key:
            ends = (layouts_a, arrays[:1]), (layouts_b, arrays[1:])
            return tuple(of.key(array, may_share=False)[0] for of, array in ends), None

        self._plans = PlanCache(key)
        layouts_a.register(self._plans.known)
        layouts_b.register(self._plans.known)
        self._dependents: weakref.WeakSet[Runner] = weakref.WeakSet()

    def forward(self, u: object, v: object) -> None:
        """Copy the cells of ``u`` to ``v``.

        Parameters
        ----------
        u : array
            A field that ``grid_a`` allocated, or an array of its padded shape on its device, with any strides. It may
            have component axes. A staggered field, or a field with another halo, must be allocated by the grid or
            declared with `Grid.declare`.
        v : array
            A field of ``grid_b`` with the same dtype, component axes and staggering. Component axes may be before the
            grid axes in one field and after the grid axes in the second field.

        Raises
        ------
        FieldError
            If an array does not fit its grid, ``v`` is read-only, the arrays share memory, or they differ in dtype,
            component axes or staggering. Fields of one parity are not supported.

        Notes
        -----
        Collective among ranks that share cells; the first call with new arrays makes a plan and is collective over
        all ranks. Ordered with CuPy's current stream on a GPU. Halos are neither read nor written.
        """
        self._run("forward", u, v)

    def backward(self, v: object, u: object) -> None:
        """Copy the cells of ``v`` to ``u``: the inverse of `forward`, with the same errors."""
        self._run("backward", u, v)

    def plan(
        self, u: object, v: object, *, backward: bool = False, path: str | None = None
    ) -> Plan:
        """Make a persistent `forward` or `backward`.

        Parameters
        ----------
        u, v : array
            The fields of `forward`, in this order for both directions.
        backward : bool
            Whether the plan copies ``v`` to ``u``.
        path : str, optional
            The data path of this plan; by default the transpose's.

        Returns
        -------
        Plan
            ``plan()`` copies. ``plan.start()`` and ``plan.finish()`` allow work in between that does not use the two
            arrays. ``plan.explain()`` describes the messages.

        Notes
        -----
        Collective over all ranks. Raises the errors of `forward`.
        """
        reverse = as_bool(backward)
        direction = "" if reverse is None else "backward" if reverse else "forward"
        return Plan(self._make(direction, u, v, keep=True, path=path))

    def close(self) -> None:
        """Close the plans; local. The grids stay open, and repeated calls have no effect."""
        self._closed = True
        self._plans.clear()
        for plan in list(self._dependents):
            plan.close()

    def __repr__(self) -> str:
        """Return both divisions."""
        a, b = self.domain_a.decomposition, self.domain_b.decomposition
        return (
            f"<halox.Transpose {a.grid_shape} on {a.proc_shape} ranks to {b.grid_shape} on {b.proc_shape} ranks, "
            f"axes {self.axes}{', closed' if self._closed else ''}>"
        )

    # Internal

    def _run(self, direction: str, u: object, v: object) -> None:
        arrays = u, v
        cached = self._plans.known.find(direction, arrays) or self._plans.find(direction, arrays)
        if cached is None:
            runner = self._make(direction, u, v, keep=False)
            cached = self._plans.add(direction, arrays, runner)
        runner, bound = cached
        runner.run(bound)

    @single_threaded
    def _make(
        self, direction: str, u: object, v: object, *, keep: bool, path: str | None = None
    ) -> Runner:
        if self._closed:
            raise ClosedError("the transpose is closed; make a new one")
        world = self._world
        world.begin("plan" if keep else direction)
        self._plans.sweep()
        (of_u, of_v), records = world.gather(lambda: self._read(direction, u, v), _MAKING)
        world.check_alike([arguments for arguments, _ in records.distinct])
        order = records[0][1]

        def draft() -> Draft:
            sides = transpose_ends(u, of_u, v, of_v, self.axes)
            source, target = sides if direction == "forward" else sides[::-1]
            return transpose_draft(source, target, order)

        runner = make_domain_plan(
            self.domain_a,
            draft,
            keep=keep,
            path=self._path if path is None else path,
            call="start of a plan" if keep else direction,
            partner=self.domain_b,
        )
        self._dependents.add(runner)
        return runner

    def _read(
        self, direction: str, u: object, v: object
    ) -> tuple[
        tuple[FieldLayout, FieldLayout],
        tuple[dict[str, object], tuple[int, ...]],
    ]:
        """Check this rank's arguments; return the layouts, and for all ranks the arguments and ``u``'s memory order."""
        if not direction:
            raise FieldError("backward must be True or False; True carries v into u")
        self.domain_b.world.check_open()
        layout_u = _layout(self.domain_a, u, "u, of grid_a")
        layout_v = _layout(self.domain_b, v, "v, of grid_b")
        check_same_field(layout_u, layout_v, self.axes)
        first, second = describe(u), describe(v)
        if first.dtype != second.dtype:
            raise FieldError(f"u has dtype {first.dtype}, v {second.dtype}; give both the same")
        name, target = ("v", second) if direction == "forward" else ("u", first)
        if not target.writable:
            raise FieldError(f"{name} is read-only; its cells cannot be set")
        if share_memory(first, second):
            raise FieldError(
                "u and v share memory, and cells would be overwritten before they are read; give two arrays apart"
            )
        arguments = {
            "direction": direction,
            "dtype": first.dtype,
            "layout of u": layout_u.spec.without_boundary,
            "layout of v": layout_v.spec.without_boundary,
        }
        order = memory_order(first, common_axes(layout_u.spec, range(len(self.axes))))
        return (layout_u, layout_v), (arguments, order)


def _check_ranks(a: Domain, b: Domain) -> None:
    if a.world.ranks is not b.world.ranks:
        raise MismatchError(
            f"grid_b is on a communicator of {b.world.size} rank(s), and grid_a on another one, of {a.world.size}; "
            "make both grids with the same comm="
        )


def _check_devices(a: Domain, b: Domain) -> None:
    if a.device_id != b.device_id:
        where = ["the host" if g.device_id is None else f"GPU {g.device_id}" for g in (a, b)]
        raise DeviceError(
            f"grid_a is on {where[0]}, grid_b on {where[1]}; make both with the same device="
        )


def _layout(domain: Domain, array: object, name: str) -> FieldLayout:
    try:
        return domain.layouts.find(array)
    except (FieldError, DeviceError) as error:
        raise type(error)(f"{name}: {error}") from error
