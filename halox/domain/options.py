"""Options of a grid, and of its fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, TypeVar, cast

import numpy as np
import numpy.typing as npt

from halox.decomposition import (
    PARITIES,
    Decomposition,
    FieldSpec,
    Parity,
    Placement,
    normalise_boundary,
    normalise_halo,
)
from halox.decomposition.field_spec import components_text
from halox.decomposition.normalise import HaloLike
from halox.errors import FieldError
from halox.runtime.arrays import DType
from halox.values import LARGEST, as_entries, as_int, as_list, shown, unknown_option

if TYPE_CHECKING:
    from mpi4py import MPI


class Arguments(TypedDict, total=False):
    """Options of `halox.Grid` apart from ``device``, which determines the type of its fields.

    ``placement`` may also be the placement of another grid with the same process grid.
    """

    halo: HaloLike
    periodic: bool | Sequence[bool] | None
    proc_shape: int | Sequence[int | None] | None
    blocks: Sequence[Sequence[int] | None] | None
    weights: npt.ArrayLike | Callable[..., npt.ArrayLike] | None
    boundary: object
    connect: object
    comm: MPI.Intracomm | None
    corners: bool
    placement: bool | Placement
    checkerboard: bool
    path: str | None
    leave_sms: bool
    dims: Sequence[str] | None
    coords: Mapping[str, object] | None
    reproducible: bool


class GridOptions(Arguments, total=False):
    """Options of `halox.Grid`, which documents them, before any check."""

    device: Literal["auto", "cpu", "gpu"]


DEFAULTS: dict[str, object] = {
    **dict.fromkeys(GridOptions.__annotations__),
    **{"halo": 1, "device": "auto", "corners": True, "placement": True},
    **{"checkerboard": False, "leave_sms": False, "reproducible": False},
}
"""Options of a grid with their defaults, most of which are None."""


Axes: TypeAlias = str | int | Sequence[str | int] | None
"""Axes of a grid by name or number; None for all."""


class FieldOptions(TypedDict, total=False):
    """Keyword options of `halox.Grid.zeros`, which documents them."""

    components: int | EllipsisType | Sequence[int | EllipsisType]
    halo: HaloLike | None
    staggered: int | Sequence[int]
    parity: Parity | None
    offsets: int | Sequence[int] | None
    boundary: object
    sign: object
    position: object


Constructor = TypeVar("Constructor", bound=Callable[..., None])
OPTIONS = tuple(FieldOptions.__annotations__)
OTHER_NAMES = {
    "components_after": "components=(2, ..., 3), with an ellipsis for the grid axes",
    "ghost": "halo",
    "ghosts": "halo",
    "shape": "grid_shape",
}
"""Options by their names in older versions and in other libraries."""
POSITIONS = ("low", "center", "high")


def grid_arguments(
    shapes: tuple[Any, ...], given: dict[str, Any]
) -> tuple[int | Sequence[int], GridOptions]:
    """Return the shape and the options in a call of `halox.Grid`; raises `TypeError` as Python does for a signature."""
    if "grid_shape" in given:
        shapes = *shapes, given.pop("grid_shape")
    for name in given:
        if name not in DEFAULTS:
            known = ["grid_shape", *DEFAULTS]
            raise TypeError(f"halox.Grid: {unknown_option(name, known, OTHER_NAMES)}")
    if len(shapes) != 1:
        shape = shapes if shapes and None not in map(as_int, shapes) else "grid_shape"
        raise TypeError(
            f"halox.Grid takes one grid_shape, and options by keyword; write halox.Grid({shape}, halo=1)"
        )
    return shapes[0], cast("GridOptions", {**DEFAULTS, **given})


def with_signature(constructor: Constructor) -> Constructor:
    """Decorate the constructor of `halox.Grid`, so that `help` shows its options and their defaults."""
    shown = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", "grid_shape")]
    shown += [Parameter(n, Parameter.KEYWORD_ONLY, default=value) for n, value in DEFAULTS.items()]
    constructor.__signature__ = Signature(shown)  # type: ignore[attr-defined]
    return constructor


def field_spec(
    options: Mapping[str, object], grid: FieldSpec, decomposition: Decomposition
) -> FieldSpec:
    """Return the layout that options describe; the defaults are the options of a plain field of the grid.

    Raises `FieldError` if an option is unknown or invalid, and `DecompositionError` if the halo is invalid.
    """
    for name in sorted(options.keys() - set(OPTIONS)):
        raise FieldError(unknown_option(name, OPTIONS, OTHER_NAMES))
    halo, sign = options.get("halo"), options.get("sign", 1)
    is_vector = isinstance(sign, str) and sign == "vector"
    return FieldSpec(
        grid.halo if halo is None else normalise_halo(halo, grid.ndim),
        *_components(options.get("components", ())),
        _staggering(options.get("staggered", ()), grid.ndim),
        _parity(options.get("parity")),
        _offsets(options.get("offsets")),
        normalise_boundary(options["boundary"], decomposition.periodic, decomposition.joined_sides)
        if "boundary" in options
        else grid.boundary,
        () if is_vector else _signs(sign),
        _positions(options.get("position"), grid.ndim),
        is_vector,
    )


def _ints(value: object) -> list[int | None]:
    return [as_int(entry) for entry in as_entries(value)]


def _components(value: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the extents of the component axes before and after the grid axes, for which an ellipsis stands."""
    entries = as_entries(value)
    places = [place for place, entry in enumerate(entries) if entry is ...]
    place = places[0] if places else len(entries)
    before, after = (
        tuple(n for n in _ints(part) if n is not None and 0 < n <= LARGEST)
        for part in (entries[:place], entries[place + 1 :])
    )
    if len(places) > 1 or len(before) + len(places) + len(after) < len(entries):
        raise FieldError(
            "components must be an int or ints > 0, with at most one ellipsis for the grid axes, as in (2, ..., 3), "
            f"got {shown(value)}"
        )
    return before, after


def _staggering(value: object, ndim: int) -> tuple[bool, ...]:
    axes = _ints(value)
    chosen = {axis % ndim for axis in axes if axis is not None and -ndim <= axis < ndim}
    if not all(axis is not None and -ndim <= axis < ndim for axis in axes):
        raise FieldError(f"staggered must name grid axes, 0 to {ndim - 1}, got {shown(value)}")
    return tuple(axis in chosen for axis in range(ndim))


def _parity(value: object) -> Parity | None:
    for known in PARITIES:
        if isinstance(value, str) and value == known:
            return known
    if value is not None:
        raise FieldError(
            f"parity must be one of {', '.join(map(repr, PARITIES))}, or None for all cells, got {shown(value)}"
        )
    return None


def _offsets(value: object) -> tuple[int, ...]:
    offsets = [] if value is None else _ints(value)
    distances = tuple(sorted({n for n in offsets if n is not None and 0 < n <= LARGEST}))
    if value is not None and (not distances or any(n not in distances for n in offsets)):
        raise FieldError(
            "offsets must be an int or ints > 0, the distances along the axes at which a stencil reads, got "
            f"{shown(value)}; leave it out for whole halos"
        )
    return distances


def _signs(value: object) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Return the signs by component; empty if no component changes its sign."""
    signs: dict[tuple[int, ...], int] = {}
    for key, sign in (value if isinstance(value, Mapping) else {(): value}).items():
        entries = _ints(key)
        component = tuple(n for n in entries if n is not None and n >= 0)
        factor = as_int(sign)
        if factor is None or abs(factor) != 1 or len(component) < len(entries):
            raise FieldError(
                f"sign must be 1 or -1, or a dict of them by component (an int, or one for each component axis), got "
                f"{shown(value)}"
            )
        signs[component] = factor
    return tuple(sorted(signs.items())) if -1 in signs.values() else ()


def _positions(value: object, ndim: int) -> tuple[int, ...]:
    if value is None:
        return ()
    places = [value] * ndim if isinstance(value, str) else as_list(value) or []
    if len(places) != ndim or any(place not in POSITIONS for place in places):
        raise FieldError(
            f"position must be 'low', 'center' or 'high', or one of them for each of {ndim} grid axes, got "
            f"{shown(value)}"
        )
    return tuple(POSITIONS.index(place) for place in places)


def fixed_dtype(dtype: npt.DTypeLike) -> DType:
    """Return a fixed-size dtype; raises `FieldError` if it holds objects, has no size, or is not a dtype."""
    try:
        fixed: DType = np.dtype(dtype)
    except Exception:  # NumPy raises several types
        hint = "; a field has the grid's shape, and the dtype comes first, as in grid.zeros('f8')"
        raise FieldError(
            f"dtype: {shown(dtype)} is not a dtype that NumPy knows{hint * isinstance(dtype, int | tuple)}"
        ) from None
    if fixed.subdtype is not None:
        raise FieldError(
            f"dtype {fixed} has axes of its own; give dtype={dtype_text(fixed.base)}, "
            f"components={components_text((), fixed.shape)}"
        )
    if fixed.hasobject or fixed.itemsize == 0:
        raise FieldError(
            f"dtype {fixed} has no fixed size of 1 byte or more; use a fixed-size dtype"
        )
    return fixed


def dtype_text(dtype: DType) -> str:
    """Return a dtype as Python code.

    Examples
    --------
    >>> dtype_text(np.dtype("f4")), dtype_text(np.dtype([("a", "f8")]))
    ("'float32'", "[('a', '<f8')]")
    """
    return repr(str(dtype)) if dtype.names is None else str(dtype)
