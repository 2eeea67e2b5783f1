"""Domains and transposes of the stages of a transform."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from halox.decomposition import Placement
from halox.domain import Domain, GridOptions
from halox.fft.modes import factor, padded
from halox.fft.stages import Stage, moved_placement, turned_placement
from halox.grid import Grid
from halox.transpose import Transpose


@dataclass(frozen=True)
class DomainStage:
    """A stage on its domains.

    Attributes
    ----------
    before, after : Domain
        Domains of the cells before and after the transforms of this stage, possibly the same domain. Their axes are in
        ``order``.
    order : tuple of int
        For each axis of these domains, the axis of the user's grid.
    axes : tuple of int
        Transformed axes of the user's grid, the halved axis last.
    """

    before: Domain
    after: Domain
    order: tuple[int, ...]
    axes: tuple[int, ...]


@dataclass(frozen=True)
class Route:
    """The parts of a transform that do not depend on the fields.

    Attributes
    ----------
    physical, spectral : Grid
        Grids of the fields on both sides.
    stages : list of DomainStage
    transposes : list of Transpose
        Transposes from the cells after each stage to the cells before the next stage.
    half : int or None
        Axis with about half the coefficients, for a real transform.
    norm : str
    points, padded : tuple of int
        Points per axis of the spectral and of the physical resolution.
    """

    physical: Grid
    spectral: Grid
    stages: list[DomainStage]
    transposes: list[Transpose]
    half: int | None
    norm: str
    points: tuple[int, ...]
    padded: tuple[int, ...]

    @property
    def dealias(self) -> bool:
        """Whether physical fields have more points than spectra."""
        return self.points != self.padded

    def factor(self, forward: bool) -> float:
        """Return the normalization factor of plain sums over exponentials."""
        found = 1.0
        for stage in self.stages:
            for axis in stage.axes:
                found *= factor(self.norm, forward, self.points[axis], self.padded[axis])
        return found


class RouteMaker:
    """Makes the domains and the transposes of a transform of ``base``; collective.

    Attributes
    ----------
    made : list of Domain, Grid and Transpose
        Everything that was made, in the order of creation; also after an error.
    """

    def __init__(self, base: Grid) -> None:
        self._base = base
        self.made: list[Domain | Grid | Transpose] = []

    def make(
        self,
        stages: Sequence[Stage],
        axes: Sequence[int],
        *,
        half: int | None,
        norm: str,
        dealias: bool,
        path: str | None,
        turns: bool,
    ) -> Route:
        """Make a route; with ``turns``, intermediate stages store their transformed axes innermost."""
        base = self._base
        shape = base.grid_shape
        natural = tuple(range(len(shape)))
        fine = tuple(padded(n) if dealias and k in axes else n for k, n in enumerate(shape))
        modes = tuple(n // 2 + 1 if axis == half else n for axis, n in enumerate(shape))
        physical = base if fine == shape else self._fine_grid(fine)
        current = physical.domain
        placement = base.domain.decomposition.placement
        sizes: list[Sequence[int]] = [axis.sizes for axis in current.decomposition.axes]
        cells, order = list(fine), natural
        on_domains: list[DomainStage] = []
        transposes: list[Transpose] = []
        for number, stage in enumerate(stages):
            if number:
                placement = moved_placement(placement, stage.moves)
                for axis in natural:
                    if stage.parts[axis] != stages[number - 1].parts[axis]:
                        sizes[axis] = _even(cells[axis], stage.parts[axis])
                inner = stage.axes if turns and number < len(stages) - 1 else ()
                order = _turned(natural, inner)
                current = self._whole(cells, sizes, order, placement)
                last = on_domains[-1]
                turn = tuple(last.order.index(axis) for axis in order)
                transpose = Transpose(last.after, current, axes=turn, path=path)
                self.made.append(transpose)
                transposes.append(transpose)
            before = current
            for axis in stage.axes:
                cells[axis] = modes[axis]
                sizes[axis] = (cells[axis],)
            if number == 0 or [cells[axis] for axis in order] != list(before.grid_shape):
                current = self._whole(cells, sizes, order, placement)
            done = tuple(axis for axis in stage.axes if axis != half)
            if half in stage.axes:
                done = (*done, half)
            on_domains.append(DomainStage(before, current, order, done))
        spectral = self._grid_of(current)
        return Route(physical, spectral, on_domains, transposes, half, norm, shape, fine)

    def _fine_grid(self, shape: Sequence[int]) -> Grid:
        """Make the grid of the padded fields."""
        base = self._base
        domain = self._domain(
            shape,
            halo=base.halo,
            periodic=base.periodic,
            corners=base.corners,
            path=base.domain.division.path,
            proc_shape=base.proc_shape,
            placement=base.domain.decomposition.placement,
        )
        return self._grid_of(domain)

    def _whole(
        self,
        cells: Sequence[int],
        sizes: Sequence[Sequence[int]],
        order: tuple[int, ...],
        placement: Placement,
    ) -> Domain:
        """Make a domain of a stage, without halo."""
        turned = turned_placement(placement, order)
        return self._domain(
            [cells[axis] for axis in order],
            halo=0,
            proc_shape=turned.proc_shape,
            blocks=[sizes[axis] for axis in order],
            placement=turned,
        )

    def _domain(self, shape: Sequence[int], **options: Any) -> Domain:
        base = self._base
        with nullcontext() if base.device_id is None else base.xp.cuda.Device(base.device_id):
            leave_sms = base.domain.division.leave_sms
            found = GridOptions(device=base.device, leave_sms=leave_sms, **options)
            domain = Domain(base.comm, shape, found)
        self.made.append(domain)
        return domain

    def _grid_of(self, domain: Domain) -> Grid:
        grid = Grid.of_domain(domain)
        self.made.append(grid)
        return grid


def _turned(natural: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the order with some axes innermost. Outermost axes stay there, since their lines form one batch."""
    if axes == natural[: len(axes)]:
        return natural
    return (*(axis for axis in natural if axis not in axes), *axes)


def _even(cells: int, parts: int) -> tuple[int, ...]:
    size, extra = divmod(cells, parts)
    return tuple(size + (part < extra) for part in range(parts))
