"""Properties of a field that the grid does not determine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING

from halox.decomposition.axis_layout import Box
from halox.decomposition.boundaries import Boundaries, boundary_text
from halox.decomposition.normalise import Halo
from halox.decomposition.parity import Parity
from halox.errors import DecompositionError, FieldError

if TYPE_CHECKING:
    from halox.decomposition.connections import Turn


@dataclass(frozen=True)
class FieldSpec:
    """Properties of a field that the grid does not determine: halo, component axes, staggering, parity, offsets.

    Parameters
    ----------
    halo : tuple of (int, int)
        ``(low, high)`` per grid axis, in cells.
    components_before, components_after : tuple of int
        Extents of the array's axes before and after the grid axes.
    staggered : tuple of bool
        Per grid axis, whether the field has one more point along it. Empty if the field is not staggered.
    parity : {"even", "odd"}, optional
        Parity of the field's cells on a checkerboard; all cells by default.
    offsets : tuple of int
        Distances along the axes at which a stencil reads the field. Exchanges then update the halo up to the largest
        distance, without corners. Empty for whole halos.
    boundary : tuple
        What an exchange writes into the halo at the walls of the grid, from `normalise_boundary`.
    signs : tuple of (component, sign)
        Signs of components across connections, () standing for all others; empty without a change.
    positions : tuple of int
        Per grid axis the place of the points in their cells: 0 (low face), 1 (center) or 2 (high face). By default
        0 along staggered axes, else 1.
    is_vector : bool
        Whether both components are those of a vector along two axes of a cubed sphere.

    Raises
    ------
    DecompositionError
        If the field is staggered and has a parity, or an offset is larger than a halo width that is not 0.
    FieldError
        If the field has a parity and a boundary, if the boundary or a sign names a component that the field does not
        have, or ``positions`` contradicts ``staggered``.
    """

    halo: Halo
    components_before: tuple[int, ...] = ()
    components_after: tuple[int, ...] = ()
    staggered: tuple[bool, ...] = ()
    parity: Parity | None = None
    offsets: tuple[int, ...] = ()
    boundary: Boundaries = ()
    signs: tuple[tuple[tuple[int, ...], int], ...] = ()
    positions: tuple[int, ...] = ()
    is_vector: bool = False

    def __post_init__(self) -> None:
        """Fill in ``staggered``, and check that the properties suit each other."""
        if not self.staggered:
            object.__setattr__(self, "staggered", (False,) * self.ndim)
        if self.parity is not None and any(self.staggered):
            raise DecompositionError(
                f"parity: a staggered field has points that are not cells of a checkerboard, got "
                f"staggered={self.staggered} with parity={self.parity!r}; give one of the two"
            )
        self._check_offsets()
        self._check_boundary()

    def _check_boundary(self) -> None:
        if self.parity is not None and self.boundary:
            raise FieldError(
                "boundary: a field of one parity has no mirror images of its cells; give boundary=None for this field"
            )
        extents = self.components_before + self.components_after
        named = [("boundary", component) for component, _ in self.boundary]
        for name, component in [*named, *(("sign", component) for component, _ in self.signs)]:
            if component and (
                len(component) != len(extents)
                or any(one >= extent for one, extent in zip(component, extents, strict=True))
            ):
                raise FieldError(
                    f"{name}: the field has no component {component}; its component axes have the extents {extents}"
                )
        if self.is_vector and self.components_before != (2,):
            raise FieldError(
                f"sign: a vector needs components=2, got {self.components_before} before the grid axes"
            )
        if any(
            place and is_so for place, is_so in zip(self.positions, self.staggered, strict=False)
        ):
            raise FieldError(
                f"position: a staggered field has its points at the low faces, got {self.positions} (0 low, 1 center, "
                f"2 high) with staggered={self.staggered}"
            )

    def _check_offsets(self) -> None:
        for axis, widths in enumerate(self.halo):
            if any(0 < width < max(self.offsets, default=0) for width in widths):
                raise DecompositionError(
                    f"offsets: the stencil reaches {max(self.offsets)} cells, and the halo along axis {axis} has "
                    f"{widths} (low, high); give a halo of {max(self.offsets)}, or of 0 on a side without"
                )

    @property
    def ndim(self) -> int:
        return len(self.halo)

    @cached_property
    def grid_axes(self) -> range:
        """Numbers of the grid axes among the axes of the array."""
        first = len(self.components_before)
        return range(first, first + self.ndim)

    @cached_property
    def grid_slice(self) -> slice:
        """The grid axes as a slice of the array's axes, such as its shape or strides."""
        return slice(self.grid_axes.start, self.grid_axes.stop)

    def box(
        self,
        starts: tuple[int, ...],
        subsizes: tuple[int, ...],
        steps: tuple[int, ...] | None = None,
    ) -> Box:
        """Box with the given extents along the grid axes and the whole component axes."""
        before, after = self.components_before, self.components_after
        if steps is not None:
            steps = (1,) * len(before) + steps + (1,) * len(after)
        starts = (0,) * len(before) + starts + (0,) * len(after)
        return Box(starts, before + subsizes + after, steps)

    @cached_property
    def without_boundary(self) -> FieldSpec:
        """The same properties without boundaries, which may hold functions that cannot be sent to another rank."""
        return replace(self, boundary=()) if self.boundary else self

    @property
    def of_cells(self) -> tuple[object, ...]:
        """Properties that determine which points a rank owns, and their order in its array: all except the halo's."""
        return self.components_before, self.components_after, self.staggered, self.parity

    def is_negative(self, turn: Turn, component: tuple[int, ...]) -> bool:
        """Whether a component changes its sign across a connection."""
        if self.is_vector:
            return turn[1 + component[0]][1] < 0
        signs = dict(self.signs)
        return signs.get(component, signs.get((), 1)) < 0

    @cached_property
    def digest(self) -> str:
        """Hash of 16 hexadecimal digits; equal specs have equal hashes in every process."""
        return blake2b(str(self).encode(), digest_size=8).hexdigest()

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        text = (
            f"components={components_text(self.components_before, self.components_after)}, "
            f"staggered={self.staggered}, halo={self.halo}"
        )
        if self.parity is not None:
            text += f", parity={self.parity!r}"
        if self.offsets:
            text += f", offsets={self.offsets}"
        if self.signs or self.is_vector:
            text += f", sign={'vector' if self.is_vector else dict(self.signs)!r}"
        if self.positions:
            text += f", position={tuple(('low', 'center', 'high')[n] for n in self.positions)}"
        return f"{text}, boundary={boundary_text(self.boundary)}" if self.boundary else text


def components_text(before: tuple[int, ...], after: tuple[int, ...]) -> str:
    """Return component axes before and after the grid axes as the value of the option ``components``.

    Examples
    --------
    >>> components_text((2,), ()), components_text((2,), (3, 4)), components_text((), (3,))
    ('(2,)', '(2, ..., 3, 4)', '(..., 3)')
    """
    return f"({', '.join(map(str, (*before, '...', *after)))})" if after else str(before)
