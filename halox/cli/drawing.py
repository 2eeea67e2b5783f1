"""Pictures and animations of slices, drawn with Matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from halox.errors import HaloxError, MissingPackageError
from halox.runtime.arrays import Array

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.image import AxesImage

_DOTS_PER_INCH = 100
_FRAMES_PER_SECOND = 5
_WIDTH, _HEIGHT = 7.2, 6.0
"""Width and height of a picture in inches; a wide field has a lower picture."""

_MOST_STRETCHED = 4
"""Largest ratio of sides for which cells are drawn as squares."""

_MOST_POINTS = {1: 100_000, 2: 1000}
"""Maximum points along an axis of a line and of an image; of more points, every n-th point is drawn."""

_DECADES = 4
"""Powers of ten in a logarithmic colour scale, unless a range is given."""

_FEW_POINTS = 50
"""Lines of fewer points mark each point, since a line of a single point would be invisible."""


@dataclass(frozen=True)
class Frame:
    """A slice to draw."""

    values: Array  # one or two axes; the first axis is drawn along x
    what: str  # name of the values
    where: str  # name of the checkpoint
    dims: tuple[str, ...]  # names of the axes
    steps: tuple[int, ...]  # distance of the values along each axis, in points of the field
    borders: tuple[tuple[int, ...], ...]  # points of each axis before which a line is drawn
    labels: tuple[tuple[int, int, str], ...] = ()  # texts beside points of an image


def steps_of(extents: Sequence[int]) -> tuple[int, ...]:
    """Return the step between drawn points along each axis of a line or an image."""
    return tuple(-(-extent // _MOST_POINTS[len(extents)]) for extent in extents)


def check(cmap: str, name: str = "halox view") -> None:
    """Raise `MissingPackageError` without Matplotlib, and HaloxError for an unknown colour map."""
    try:
        from matplotlib import animation, colormaps, figure
    except ImportError as error:
        raise MissingPackageError(
            f"{name} needs Matplotlib, which cannot be imported ({error}): pip install matplotlib"
        ) from error
    del animation, figure
    if cmap not in colormaps:
        near = get_close_matches(cmap, list(colormaps)) or ["viridis", "gray", "RdBu"]
        raise HaloxError(
            f"--cmap: Matplotlib has no colour map {cmap}; it has {', '.join(near)}, ..."
        )


def check_name(path: Path, suffix: str) -> None:
    """Raise HaloxError unless a file's name has the suffix of its format."""
    if path.suffix != suffix:
        raise HaloxError(
            f"--{suffix[1:]}: expected the name of a file that ends in {suffix}, got {path}"
        )


def limits_of(frames: Sequence[Frame], *, log: bool = False) -> tuple[float, float]:
    """Return the smallest and largest finite value of all frames; 0 and 1 if no value is finite.

    With ``log``, the lower limit is at most `_DECADES` powers of ten below the largest value.
    """
    finite = [frame.values[np.isfinite(frame.values)] for frame in frames]
    found = [(float(values.min()), float(values.max())) for values in finite if values.size]
    low, high = (min(low for low, _ in found), max(high for _, high in found)) if found else (0, 1)
    if log:
        if high <= 0:
            raise HaloxError(
                f"--log: no value of {frames[0].what} is above 0, the largest is {high:g}; leave out --log"
            )
        low = max(low, high / 10**_DECADES)
    return low, high


def draw(
    frames: Sequence[Frame],
    path: Path,
    cmap: str,
    limits: tuple[float, float],
    *,
    log: bool = False,
) -> None:
    """Write a PNG file of one frame, or a GIF file of all frames, with linear or logarithmic colours.

    Raises `HaloxError` if the file cannot be written.
    """
    from matplotlib.animation import PillowWriter

    picture = _Picture(frames[0], cmap, limits, log)
    try:
        if path.suffix == ".png":
            with path.open("wb") as file:
                picture.figure.savefig(file, format="png")
            return
        writer = PillowWriter(fps=_FRAMES_PER_SECOND)
        with writer.saving(picture.figure, str(path), _DOTS_PER_INCH):
            for frame in frames:
                picture.show(frame)
                writer.grab_frame()
    except OSError as error:
        raise HaloxError(
            f"writing {path} failed: {error}; give the name of another file"
        ) from error


class _Picture:
    """A figure that shows one frame after another, with the same axes and colours.

    ``figure`` does not use pyplot, so it needs no display and does not change pyplot's state.
    """

    def __init__(self, first: Frame, cmap: str, limits: tuple[float, float], log: bool) -> None:
        from matplotlib.colors import LogNorm, Normalize
        from matplotlib.figure import Figure

        # Cell n extends from n - 1/2 to n + 1/2, so that its tick is at its centre.
        ends = [
            step * extent - 0.5
            for step, extent in zip(first.steps, first.values.shape, strict=True)
        ]
        is_stretched = max(ends) > _MOST_STRETCHED * min(ends)
        height = _HEIGHT if is_stretched else min(_HEIGHT, 5.6 * ends[-1] / ends[0] + 1.2)
        self.figure = Figure(figsize=(_WIDTH, height), dpi=_DOTS_PER_INCH, layout="compressed")
        self._axes = self.figure.add_subplot()
        self._borders: list[Artist] = []
        self._image: AxesImage | None = None
        self._line: Any = None
        if first.values.ndim == 2:
            self._image = self._axes.imshow(
                first.values.T,
                origin="lower",
                extent=(-0.5, ends[0], -0.5, ends[1]),
                aspect="auto" if is_stretched else "equal",
                cmap=cmap,
                norm=(LogNorm if log else Normalize)(*limits, clip=log),
                interpolation="nearest",
            )
            self._axes.set(xlabel=first.dims[0], ylabel=first.dims[1])
            self.figure.colorbar(self._image, ax=self._axes)
        else:
            places = np.arange(len(first.values)) * first.steps[0]
            marker = "." if len(places) < _FEW_POINTS else ""
            (self._line,) = self._axes.plot(places, first.values, marker=marker)
            margin = 0.05 * (limits[1] - limits[0]) or 0.5
            self._axes.set(
                xlabel=first.dims[0],
                xlim=(-0.5, ends[0]),
                yscale="log" if log else "linear",
                ylim=(limits[0] / 1.5 if log else limits[0] - margin, limits[1] + margin),
            )
        self.show(first)

    def show(self, frame: Frame) -> None:
        """Show another frame."""
        from matplotlib.patheffects import withStroke

        if self._image is not None:
            self._image.set_data(frame.values.T)
        else:
            self._line.set_ydata(frame.values)
        self._axes.set_title(f"{frame.what}\n{frame.where}", fontsize="medium")
        for drawn in self._borders:
            drawn.remove()
        outlined = [withStroke(linewidth=2.4, foreground="black")]
        draw_lines = (self._axes.axvline, self._axes.axhline)
        self._borders = [
            draw_line(
                start - 0.5,
                color="white",
                linewidth=1.2,
                path_effects=outlined,
            )
            for draw_line, starts in zip(draw_lines, frame.borders, strict=False)
            for start in starts
        ]
        self._borders += [
            self._axes.annotate(
                text,
                (x - 0.5, y - 0.5),
                xytext=(6, 6),
                textcoords="offset points",
                color="white",
                fontweight="bold",
                path_effects=outlined,
            )
            for x, y, text in frame.labels
        ]
