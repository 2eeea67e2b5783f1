"""Boundary conditions: how an exchange fills the halo at the walls of a grid, where a block has no neighbour.

A wall is filled one axis after the other, in their order. The fill of an axis covers the halos of the earlier axes and
the halos that the neighbours have filled. So edges and corners have the values that `numpy.pad` gives them, and each
rank fills its part of a wall without any message.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import Parameter, signature
from numbers import Number
from typing import Any, TypeAlias

from halox.errors import FieldError
from halox.values import as_int, as_list, check_unmasked, has_unit, shown

PERIODIC = ("periodic", "wrap")
WORDS = ("edge", "reflect", "symmetric", "antireflect", "antisymmetric", "extrapolate")
WITH_NUMBER = ("constant", "gradient", "phase")
MAY_HAVE_NUMBER = ("antireflect", "antisymmetric")  # the value at the mirror, by default 0

OTHER_NAMES = {
    "dirichlet": '"antisymmetric" or ("antisymmetric", a), for the value 0 or a on the face of the first cell',
    "neumann": '"symmetric", for no gradient at the face of the first cell, or ("gradient", g)',
    "wall": '"antisymmetric" for the velocity through the wall, "symmetric" for other quantities',
    "zero": '("constant", 0), for zeros in the halo, or "antisymmetric", for the value 0 on the face',
}
"""Words of other programs, with the boundaries that do the same."""

SIDES = ("low", "high")


@dataclass(frozen=True)
class Boundary:
    """Rule by which an exchange fills the halo beyond one side of the grid.

    Attributes
    ----------
    kind : str
        One of `WORDS` or `WITH_NUMBER`, or "function".
    number : complex or None
        The number of a kind in `WITH_NUMBER` or `MAY_HAVE_NUMBER`.
    function : callable or None
        Called as ``function(slab, axis, side, indices)``, or with the field as fifth argument if `takes_field`.
    """

    kind: str
    number: complex | None = None
    function: Callable[..., object] | None = None

    @property
    def mirrors(self) -> bool:
        """Whether each layer is the image of another layer inside."""
        return self.mirrors_at_point or self.kind in ("symmetric", "antisymmetric")

    @property
    def mirrors_at_point(self) -> bool:
        """Whether the mirror is at the points next to the wall, so that these have no image."""
        return self.kind in ("reflect", "antireflect")

    @property
    def takes_field(self) -> bool:
        """Whether the function has a fifth parameter without a default."""
        try:
            parameters = signature(self.function).parameters.values()  # type: ignore[arg-type]
        except (TypeError, ValueError):  # of a compiled function
            return False
        kinds = Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD
        return sum(one.kind in kinds and one.default is Parameter.empty for one in parameters) > 4

    def reach(self, width: int) -> int:
        """Return the number of points next to the wall that a fill of this width reads."""
        if self.mirrors:
            return width + self.mirrors_at_point if width else 0
        by_kind = {"edge": 1, "gradient": 1, "extrapolate": 2}
        return by_kind.get(self.kind, 0) if width else 0

    def __str__(self) -> str:
        """Return the boundary as users write it; a function is named, since its address differs between ranks."""
        if self.function is not None:
            return getattr(self.function, "__qualname__", type(self.function).__qualname__)
        return repr(self.kind if self.number is None else (self.kind, self.number))


def mirrored(
    index: int, points: int, pair: Sequence[Boundary | None]
) -> tuple[Boundary, int] | None:
    """Return the rule for a layer beyond an end of an axis of some points, and the point that the rule reads.

    ``pair`` has the boundaries of the low and the high end. A layer that is further from the end than the axis is long
    is reflected at both ends in turn. None if the other end has no mirror, or if mirrors at different numbers would
    add their difference.

    Examples
    --------
    >>> wall = Boundary("antisymmetric")
    >>> [mirrored(layer, 2, (wall, wall)) for layer in (-2, -3)] == [(wall, 1), (Boundary("symmetric"), 1)]
    True
    """
    side, reflections, sign = int(index >= points), 0, 1
    number: complex = 0
    first, kinds = pair[side], {one and one.kind for one in pair}
    assert first is not None
    if points == 1 and kinds <= {"reflect", "antireflect"}:
        # The image of each mirror is the image of the other one. NumPy repeats the only point.
        return (first, 0) if kinds == {"reflect"} else None
    while not 0 <= index < points:
        boundary = pair[side]
        if boundary is None or not boundary.mirrors:
            return None
        at_point = boundary.mirrors_at_point
        index = (2 * points - 1 - at_point if side else at_point - 1) - index
        if boundary.kind in MAY_HAVE_NUMBER:
            number, sign = number + sign * (boundary.number or 0), -sign
        side, reflections = 1 - side, reflections + 1
    if reflections == 1:
        return first, index
    if sign > 0:
        return None if number else (Boundary(first.kind.removeprefix("anti")), index)
    return Boundary("antisymmetric", number or None), index


Sides: TypeAlias = tuple[tuple[Boundary | None, Boundary | None], ...]
"""Boundaries at the (low, high) side of each grid axis; None leaves the halo there as it is."""

Boundaries: TypeAlias = tuple[tuple[tuple[int, ...], Sides], ...]
"""Boundaries by component; () stands for all components that are not named. Empty if there is no boundary."""


def normalise_boundary(
    boundary: object, periodic: Sequence[bool], joined: Collection[tuple[int, int]] = ()
) -> Boundaries:
    """Return the boundaries of a field on a grid that is periodic along some axes.

    ``boundary`` has the forms that `halox.Grid` documents; a mapping gives forms by component. ``joined`` has the axis
    and the number of each joined side. Raises `FieldError` if it has another form, or does not suit an axis.

    Examples
    --------
    >>> normalise_boundary("edge", (False, True))
    (((), ((Boundary(kind='edge', number=None, function=None), Boundary(kind='edge', number=None, function=None)), \
(None, None))),)
    >>> normalise_boundary(None, (False, True))
    ()
    """
    forms: Mapping[Any, object] = boundary if isinstance(boundary, Mapping) else {(): boundary}
    by_component = {}
    for key, form in forms.items():
        entries = as_list(key)
        component = [as_int(one) for one in ([key] if entries is None else entries)]
        if any(one is None or one < 0 for one in component):
            raise FieldError(
                f"boundary: the keys of a mapping are components (an int >= 0, or one for each component axis), got "
                f"{shown(key)}"
            )
        sides = _on_walls(_sides(form, len(periodic)), _is_one(form), periodic, joined)
        by_component[tuple(one for one in component if one is not None)] = sides
    if not any(side for sides in by_component.values() for pair in sides for side in pair):
        return ()
    return tuple(sorted(by_component.items(), key=lambda item: item[0]))


def boundary_text(boundaries: Boundaries) -> str:
    """Return boundaries as text, the same on all ranks that give the same arguments.

    Examples
    --------
    >>> boundary_text(normalise_boundary(("edge", ("constant", 0.5)), (False, False)))
    "(('edge', 'edge'), (('constant', 0.5), ('constant', 0.5)))"
    """
    texts = {component: f"({', '.join(map(_text, sides))})" for component, sides in boundaries}
    if (len(texts) < 2 and () in texts) or not texts:
        return texts.get((), "None")
    return f"{{{', '.join(f'{component}: {text}' for component, text in texts.items())}}}"


def with_periodic_boundary(boundary: object, periodic: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return the periodicity of a grid: along an axis also if the boundary of both its sides says so.

    Raises `FieldError` if only one side is periodic, or the boundary has another form.
    """
    result = []
    for axis, (pair, already) in enumerate(
        zip(_sides(boundary, len(periodic)), periodic, strict=True)
    ):
        joined = [side is not None and side.kind in ("periodic", "phase") for side in pair]
        if any(joined) and not all(joined) and not already:
            raise FieldError(
                f"boundary: axis {axis} is periodic on one side alone, got {_text(pair)}; give one boundary for both "
                "sides"
            )
        result.append(already or all(joined))
    return tuple(result)


def _on_walls(
    sides: Sides,
    is_for_all: bool,
    periodic: Sequence[bool],
    joined: Collection[tuple[int, int]],
) -> Sides:
    """Return the boundaries without the periodic sides; raises `FieldError` if one does not suit its axis."""
    result = []
    for axis, (pair, wraps) in enumerate(zip(sides, periodic, strict=True)):
        kept = [None if (axis, side) in joined else one for side, one in enumerate(pair)]
        if not is_for_all and tuple(kept) != pair:
            raise FieldError(
                f"boundary: axis {axis} has a side joined by connect, got {_text(pair)}; give None for this side"
            )
        pair = kept[0], kept[1]
        kinds = {side.kind for side in pair if side is not None}
        if wraps and kinds - {"periodic", "phase"}:
            # One boundary for the whole grid is meant for its walls.
            if not is_for_all or all(periodic):
                raise FieldError(
                    f"boundary: axis {axis} is periodic and has no wall for {_text(pair)}; give None for this axis, or "
                    "make the grid without periodic"
                )
            pair = (None, None)
        if not wraps and kinds & {"periodic", "phase"}:
            raise FieldError(
                f"boundary: axis {axis} of the grid is not periodic, got {_text(pair)}; make the grid with "
                f"periodic=True for this axis"
            )
        if "phase" in kinds and pair[0] != pair[1]:
            raise FieldError(
                f"boundary: axis {axis} needs the same phase on both sides, got {_text(pair)}"
            )
        low, high = (None if s is None or s.kind == "periodic" else s for s in pair)
        result.append((low, high))
    return tuple(result)


def _sides(form: object, ndim: int) -> Sides:
    """Return the boundary of each side from one form for all, one per axis, or pairs of them."""
    if _is_one(form):
        return ((_one(form), _one(form)),) * ndim
    axes = as_list(form)
    if axes is None:
        raise _wrong(form)
    if len(axes) != ndim:
        raise FieldError(
            f"boundary: expected one entry per grid axis ({ndim}), got {len(axes)} in {shown(form)}"
        )
    result = []
    for axis in axes:
        pair = [axis, axis] if _is_one(axis) else as_list(axis)
        if pair is None or len(pair) != 2:
            raise _wrong(axis)
        result.append((_one(pair[0]), _one(pair[1])))
    return tuple(result)


def _is_one(form: object) -> bool:
    """Whether a form is a single boundary."""
    if form is None or isinstance(form, str) or callable(form):
        return True
    if not isinstance(form, (tuple, list)) or len(form) != 2 or not isinstance(form[0], str):
        return False
    kind, number = form
    return kind in WITH_NUMBER or (kind in MAY_HAVE_NUMBER and isinstance(number, Number))


def _one(form: Any) -> Boundary | None:
    if form is None:
        return None
    if isinstance(form, str):
        if form in PERIODIC:
            return Boundary("periodic")
        if form in WORDS:
            return Boundary(form)
        raise _wrong(form)
    if callable(form):
        boundary = Boundary("function", function=form)
        _check_parameters(boundary)
        return boundary
    if not _is_one(form):
        raise _wrong(form)
    kind, number = form
    check_unmasked(number, "boundary")
    with suppress(Exception):  # not a scalar of an array library
        number = number.item()
    if not isinstance(number, (bool, int, float, complex)) or has_unit(form[1]):
        raise FieldError(f"boundary: {kind!r} needs a number, got {shown(form[1])}")
    if kind == "phase" and number == 0:
        raise FieldError("boundary: a phase must not be 0")
    return Boundary(kind, number)


def _check_parameters(boundary: Boundary) -> None:
    """Raise `FieldError` if a function cannot be called as boundaries are."""
    try:
        parameters = signature(boundary.function)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # of a compiled function
        return
    try:
        parameters.bind(*range(5 if boundary.takes_field else 4))
    except TypeError:
        raise FieldError(
            f"boundary: {boundary}{parameters} cannot be called as function(slab, axis, side, indices), or with the "
            "field as fifth argument"
        ) from None


def _text(pair: Sequence[Boundary | None]) -> str:
    return f"({', '.join(str(side) for side in pair)})"


def _wrong(form: object) -> FieldError:
    words = ", ".join(map(repr, (*PERIODIC, *WORDS)))
    pairs = ", ".join(f"({kind!r}, number)" for kind in (*WITH_NUMBER, *MAY_HAVE_NUMBER))
    forms = f"None, {words}, {pairs} or a function, for all sides, one per axis, or (low, high) per axis"
    if isinstance(form, str):
        forms = OTHER_NAMES.get(form.lower(), forms)
    elif isinstance(form, Number):
        forms = f'("constant", {form}), the number in the halo, or ("antisymmetric", {form}), on the face'
    return FieldError(f"boundary: {shown(form)} is no boundary; give {forms}")
