"""Fields as labelled arrays, for those who have xarray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from halox.decomposition import FieldLayout
from halox.errors import FieldError, MissingPackageError
from halox.runtime.gpu.devices import to_host
from halox.values import as_list, shown


class Fields(Protocol):
    """A grid, as far as it is looked at here."""

    rank: int
    grid_shape: tuple[int, ...]
    proc_shape: tuple[int, ...]

    def layout(self, field: object) -> FieldLayout:
        """Return where the cells of a field lie."""

    def interior(self, field: object) -> Any:
        """Return a view of the cells that this rank owns."""


def dataarray(
    grid: Fields, field: object, *, name: str | None = None, dims: Sequence[str] | None = None
) -> Any:
    """Return the cells of a field that this rank owns, with their global indices as coordinates.

    Parameters
    ----------
    grid : Grid
    field : array
        A field of the grid.
    name : str, optional
        Name of the result.
    dims : sequence of str, optional
        Names of the grid axes; ("x", "y", "z", "t") by default.

    Returns
    -------
    xarray.DataArray
        On the host; a view of the field where that is on the host too. Component axes are called
        "component_0", "component_1", ...

    Raises
    ------
    MissingPackageError
        If xarray is not installed.
    FieldError
        If ``dims`` does not have a name for each grid axis, ``name`` is none, or the field is of one parity.

    Notes
    -----
    Local. `xarray.combine_by_coords` puts the blocks of several ranks together.
    """
    try:
        import xarray
    except ImportError as error:
        raise MissingPackageError(
            "dataarray needs xarray; install it with `pip install xarray`"
        ) from error
    layout = grid.layout(field)
    if layout.spec.parity is not None:
        raise FieldError(
            f"field has {layout.spec.parity} cells only, whose coordinates are no product of axes; set the cells of a "
            "field of the whole grid from it"
        )
    ndim = len(grid.grid_shape)
    given = as_list(("x", "y", "z", "t")[:ndim] if dims is None else dims)
    axes = [axis for axis in given or () if isinstance(axis, str)]
    if given is None or len(axes) < len(given) or len(set(axes)) != ndim or len(axes) != ndim:
        raise FieldError(f"dims must name {ndim} grid axes, got {shown(dims)}")
    if name is not None and not isinstance(name, str):
        raise FieldError(f"name must be a str or None, got {shown(name)}")
    before = len(layout.spec.components_before)
    names = [f"component_{n}" for n in range(before + len(layout.spec.components_after))]
    coords = {
        axis: range(owned.start, owned.stop) for axis, owned in zip(axes, layout.owned, strict=True)
    }
    return xarray.DataArray(
        to_host(grid.interior(field)),
        dims=(*names[:before], *axes, *names[before:]),
        coords=coords,
        name=name,
        attrs={"rank": grid.rank, "proc_shape": grid.proc_shape, "grid_shape": grid.grid_shape},
    )
