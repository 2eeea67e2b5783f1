"""``halox view``: a picture of a field in a checkpoint, or an animation of several checkpoints."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from halox.checkpoint.fields import StoredField
from halox.checkpoint.reading import Pick, Projection, Stored, opened_for_reading
from halox.cli import drawing, launcher
from halox.cli.progress import TerminalProgress
from halox.dimension_names import FACE
from halox.errors import HaloxError

_NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")


@dataclass(frozen=True)
class Axis:
    """A grid axis of a field: its index among all axes, its dimension, the dimension without suffix, and its points."""

    place: int
    dim: str
    base: str
    points: int


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``view`` to the command's parser."""
    about = "draw a slice or a projection of a checkpoint, or several as an animation"
    viewing = commands.add_parser("view", help=about, description=f"{about}.")
    # argparse parses -1e-3 as an option; this replaces its pattern of negative numbers by a wider pattern.
    viewing._negative_number_matcher = _NEGATIVE
    viewing.add_argument(
        "checkpoints", nargs="+", type=Path, metavar="CHECKPOINT", help="folder or .npy file"
    )
    viewing.add_argument(
        "--field", metavar="NAME", help="field to draw (default: the first by name)"
    )
    viewing.add_argument(
        "--slice",
        dest="slices",
        type=_slice,
        action="append",
        default=[],
        metavar="AXIS=INDEX",
        help="index along an axis, from the end if negative; repeatable (default: the middle of every axis after the "
        "first two)",
    )
    viewing.add_argument(
        "--project",
        dest="projections",
        type=_projection,
        action="append",
        default=[],
        metavar="AXIS=max|mean",
        help="largest or mean value along an axis; repeatable",
    )
    viewing.add_argument(
        "--component",
        type=_component,
        metavar="N[,N...]",
        help="index along each component axis (default: 0)",
    )
    viewing.add_argument(
        "--blocks", action="store_true", help="outline the blocks of the ranks that saved it"
    )
    output = viewing.add_mutually_exclusive_group()
    output.add_argument(
        "--png", type=Path, metavar="FILE", help="picture (default: CHECKPOINT.FIELD.png)"
    )
    output.add_argument(
        "--gif",
        type=Path,
        metavar="FILE",
        help="animation (default of several: CHECKPOINT.FIELD.gif, of the first)",
    )
    viewing.add_argument(
        "--log", action="store_true", help="colours by powers of ten, of values above 0"
    )
    viewing.add_argument("--cmap", default="viridis", metavar="NAME", help="Matplotlib colour map")
    viewing.add_argument(
        "--range",
        nargs=2,
        type=float,
        metavar=("LOW", "HIGH"),
        help="values at the ends of the colour bar (default: those of all checkpoints)",
    )


def view(args: argparse.Namespace) -> int:
    """Run ``halox view`` and return the exit status."""
    if (launcher.running_ranks() or 1) > 1:
        raise HaloxError("halox view is one process; run it without a launcher")
    suffix = _suffix(args)
    drawing.check(args.cmap)
    if args.range is not None:
        (low, high), least = args.range, 0 if args.log else -math.inf
        if not least < low < high < math.inf:
            above = ", above 0 with --log" if args.log else ""
            raise HaloxError(
                f"--range: expected two finite numbers LOW < HIGH{above}, got {low:g} {high:g}"
            )
    frames, field, others = _frames(args)
    path = args.png or args.gif or _default_output(args.checkpoints[0], field, suffix)
    limits = args.range or drawing.limits_of(frames, log=args.log)
    drawing.draw(frames, path, args.cmap, (limits[0], limits[1]), log=args.log)
    number = f"{len(frames)} frame(s), " if path.suffix == ".gif" else ""
    rest = f" (other fields: {', '.join(others)})" if others and args.field is None else ""
    print(f"{path}: {number}{frames[0].what}, from {limits[0]:g} to {limits[1]:g}{rest}")
    return 0


def _frames(args: argparse.Namespace) -> tuple[list[drawing.Frame], str, list[str]]:
    """Return a frame per checkpoint, the field's name in the first, and the names of other fields in the last."""
    frames: list[drawing.Frame] = []
    first = ""
    others: list[str] = []
    kinds: list[str] = []
    name = args.field
    progress = TerminalProgress(0)
    try:
        for path in args.checkpoints:
            with opened_for_reading(path.absolute()) as stored:
                field = _field(stored, name)
                first = first or field.name
                others = [other for other in stored.fields if other != field.name]
                if path.suffix != ".npy":  # the field of a .npy file has the file's name
                    name = field.name
                dims = ", ".join(stored.dims(field.name))
                numbers = "complex" if field.dtype.kind == "c" else "real"
                kinds.append(f"a {numbers} field of shape {field.shape} along {dims}")
                if kinds[-1] != kinds[0]:
                    raise HaloxError(
                        f"the frames of an animation are of one kind of field, but {args.checkpoints[0]} has "
                        f"{kinds[0]}, and {path} has {kinds[-1]}; view them one by one"
                    )
                frames.append(_frame(stored, field, args, progress))
    finally:
        progress.clear()
    return frames, first, others


def _suffix(args: argparse.Namespace) -> str:
    """Return the suffix of the file to write; raise HaloxError if the requested file has another suffix."""
    several = len(args.checkpoints) > 1
    if args.png is not None and several:
        raise HaloxError(
            f"--png is a picture of one checkpoint, and {len(args.checkpoints)} are given; write a --gif"
        )
    suffix = ".gif" if several or args.gif is not None else ".png"
    path: Path | None = args.gif if args.png is None else args.png
    if path is not None:
        drawing.check_name(path, suffix)
    return suffix


def _default_output(checkpoint: Path, field: str, suffix: str) -> Path:
    """Return the default file for a picture of a field, in the folder of the checkpoint.

    Its name consists of the checkpoint's full name and the field's name, so that each field has a separate file.
    """
    if checkpoint.name in ("", ".."):
        checkpoint = checkpoint.resolve()
    parts = [checkpoint.name] if checkpoint.suffix == ".npy" else [checkpoint.name, field]
    return checkpoint.with_name(".".join(parts) + suffix)


def _field(stored: Stored, name: str | None) -> StoredField:
    """Return the field to draw; by default the first field."""
    if not stored.fields:
        raise HaloxError(f"{stored.path} has no fields")
    found = next(iter(stored.fields)) if name is None else name
    if found not in stored.fields:
        raise HaloxError(f"{stored.path} has no field {found}; it has {', '.join(stored.fields)}")
    return stored.fields[found]


def _frame(
    stored: Stored, field: StoredField, args: argparse.Namespace, progress: TerminalProgress
) -> drawing.Frame:
    """Read the frame of a checkpoint."""
    axes = _axes(field, stored.dims(field.name))
    component, index = _components(field, args.component)
    picks: dict[int, Pick] = dict(index)
    for option, asked in (("--slice", args.slices), ("--project", args.projections)):
        for name, pick in asked:
            axis = _axis(axes, name, option, field.name)
            if axis.place in picks:
                raise HaloxError(f"{option}: axis {axis.dim} is given twice; give each axis once")
            picks[axis.place] = _within(axis, pick) if isinstance(pick, int) else pick
    if {"max", "mean"} <= set(picks.values()):
        raise HaloxError("--project: expected one of max and mean for all axes, got both")
    shown = [axis for axis in axes if axis.place not in picks]
    if not shown:
        raise HaloxError(
            f"--slice, --project: no axis of {field.name} is left to draw; leave one of them out"
        )
    for axis in shown[2:]:
        picks[axis.place] = axis.points // 2
    shown = shown[:2]
    steps = drawing.steps_of([axis.points for axis in shown])
    for axis, step in zip(shown, steps, strict=True):
        picks[axis.place] = slice(0, None, step)
    borders = _borders(stored, field, axes, shown) if args.blocks else ((),) * len(shown)
    values = stored.part(
        field.name,
        [picks[place] for place in range(len(field.shape))],
        lambda done, total: progress(f"reading {stored.path.name}", done, total),
    )
    what = f"|{component}|" if field.dtype.kind == "c" else component
    projected = [axis for axis in axes if isinstance(picks[axis.place], str)]
    if projected:
        kind = picks[projected[0].place]
        what = f"{kind} of {what} over {', '.join(axis.dim for axis in projected)}"
    at = [f"{a.dim} = {picks[a.place]}" for a in axes if isinstance(picks[a.place], int)]
    return drawing.Frame(
        values,
        " at ".join([what, *filter(None, [", ".join(at)])]),
        ", ".join([stored.path.name, *_numbers(stored.attrs)]),
        tuple(axis.dim for axis in shown),
        steps,
        borders,
    )


def _axes(field: StoredField, dims: Sequence[str]) -> list[Axis]:
    """Return the grid axes of a field."""
    suffixes = [FACE if n in field.staggered else "" for n in range(_grid_axes(field))]
    if field.parity:
        suffixes[-1] = f"_{field.parity}"
    places = range(field.before, field.before + len(suffixes))
    return [
        Axis(place, dims[place], dims[place].removesuffix(suffix), field.shape[place])
        for place, suffix in zip(places, suffixes, strict=True)
    ]


def _grid_axes(field: StoredField) -> int:
    return len(field.shape) - field.before - field.after


def _axis(axes: Sequence[Axis], name: str, option: str, field: str) -> Axis:
    """Return an axis by its dimension name, with or without the suffix for faces or parity."""
    for axis in axes:
        if name in (axis.dim, axis.base):
            return axis
    known = ", ".join(axis.dim for axis in axes)
    raise HaloxError(f"{option}: {field} has no axis {name}; its grid axes are {known}")


def _within(axis: Axis, index: int) -> int:
    if not -axis.points <= index < axis.points:
        raise HaloxError(
            f"--slice: {axis.dim}={index} is outside of the field, which has {axis.points} points along {axis.dim}: "
            f"expected 0 to {axis.points - 1}, or -{axis.points} to -1 from the end"
        )
    return index % axis.points


def _components(
    field: StoredField, asked: tuple[int, ...] | None
) -> tuple[str, list[tuple[int, int]]]:
    """Return the name of the component to draw, and the index along each component axis."""
    first_after = len(field.shape) - field.after
    places = [*range(field.before), *range(first_after, len(field.shape))]
    extents = tuple(field.shape[place] for place in places)
    index = (0,) * len(places) if asked is None else asked
    fits = len(index) == len(places)
    if not fits or not all(0 <= i < n for i, n in zip(index, extents, strict=True)):
        text = ",".join(map(str, index))
        if not places:
            raise HaloxError(
                f"--component: {field.name} has no components, got {text}; leave it out"
            )
        raise HaloxError(
            f"--component: {field.name} has components of shape {extents}, got {text}; give an index along each "
            f"component axis, as in --component {','.join('0' for _ in places)}"
        )
    name = f"{field.name}[{', '.join(map(str, index))}]" if places else field.name
    return name, list(zip(places, index, strict=True))


def _borders(
    stored: Stored, field: StoredField, axes: Sequence[Axis], shown: Sequence[Axis]
) -> tuple[tuple[int, ...], ...]:
    """Return the first points of all blocks except the first block, along each axis of the picture."""
    if not stored.blocks:
        why = (
            "a .npy file has no place for them: save a group instead, under a name without .npy"
            if stored.path.suffix == ".npy"
            else "an earlier version of halox wrote it: save it again"
        )
        raise HaloxError(f"--blocks: {stored.path} does not record the blocks of its ranks; {why}")
    starts = [tuple(accumulate(sizes[:-1])) for sizes in stored.blocks]
    if field.parity:
        starts[-1] = tuple(start // 2 for start in starts[-1])
    return tuple(starts[axes.index(axis)] for axis in shown)


def _numbers(attrs: dict[str, object]) -> list[str]:
    """Return the texts of numeric attributes, such as step and time; at most three."""
    return [
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in attrs.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ][:3]


def _slice(text: str) -> tuple[str, int]:
    name, equals, index = text.partition("=")
    try:
        if name and equals:
            return name, int(index)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected AXIS=INDEX, such as z=32, got {text!r}")


def _projection(text: str) -> tuple[str, Projection]:
    name, _, kind = text.partition("=")
    if name and (kind == "max" or kind == "mean"):
        return name, "max" if kind == "max" else "mean"
    raise argparse.ArgumentTypeError(f"expected AXIS=max or AXIS=mean, got {text!r}")


def _component(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected an index, or several as in 0,2, got {text!r}"
        ) from None
