"""``halox view``: pictures of checkpoints, by xarray and Matplotlib; the pictures of apps are drawn here, too."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from halox.domain.dimension_names import AXES
from halox.errors import HaloxError, MissingPackageError
from halox.io.checkpoint.fields import TABLE
from halox.io.checkpoint.folder import METADATA
from halox.io.checkpoint.store import PREFIX
from halox.runtime.arrays import Array

_MOST_POINTS = 1000  # along an axis of an image; of more, every n-th point is read
_MOST_RECORDS = 200  # of an output, in an animation

_DECADES = 4
"""Powers of ten in a logarithmic colour scale, unless a range is given."""


@dataclass(frozen=True)
class Frame:
    """A picture of a field along one or two axes."""

    values: Array  # the first axis is drawn along x
    title: str
    dims: Sequence[str]
    extents: Sequence[int]  # points of the field along each axis
    blocks: Sequence[Sequence[int]] = ()  # sizes of the blocks to outline along each axis
    labels: Sequence[tuple[int, int, str]] = ()  # texts beside points of an image
    steps: Sequence[tuple[float, float]] = ()  # first coordinate and spacing along each axis


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``view`` to the command's parser."""
    about = "draw a slice or a projection of a checkpoint, or several as an animation"
    viewing = commands.add_parser("view", help=about, description=f"{about}.")
    add = viewing.add_argument
    add("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT", help="Zarr group or .npy file")
    add("--field", metavar="NAME", help="field to draw (default: the first by name)")
    text = "index along an axis, or its largest or mean value (default: its middle after two axes)"
    names, kind = ("--slice", "--project"), "AXIS=INDEX|max|mean"
    add(*names, dest="picks", type=axis_pick, action="append", default=[], metavar=kind, help=text)
    add("--blocks", action="store_true", help="outline the blocks of the ranks that saved it")
    output = viewing.add_mutually_exclusive_group()
    text = "picture (default: CHECKPOINT.FIELD.png)"
    output.add_argument("--png", type=Path, metavar="FILE", help=text)
    text = "animation (default of several: CHECKPOINT.FIELD.gif, of the first)"
    output.add_argument("--gif", type=Path, metavar="FILE", help=text)
    add("--log", action="store_true", help="colours by powers of ten, of values above 0")
    add("--cmap", default="viridis", metavar="NAME", help="Matplotlib colour map")
    text = "values at the ends of the colour bar (default: least and largest of all checkpoints)"
    add("--range", nargs=2, type=float, metavar=("LOW", "HIGH"), help=text)


def axis_pick(text: str) -> tuple[str, int | str]:
    """Return the axis and the index or the kind of projection."""
    axis, _, pick = text.partition("=")
    return axis, pick if pick in ("max", "mean") else int(pick)


def view(args: argparse.Namespace) -> int:
    """Run ``halox view`` and return the exit status."""
    first, is_animation = args.checkpoints[0], len(args.checkpoints) > 1 or args.gif is not None
    if is_animation and args.png is not None:
        raise HaloxError("--png is a picture of one checkpoint; write a --gif of several")
    check_packages("halox view", "matplotlib", "xarray", "zarr")
    frames, name = [], args.field
    for path in args.checkpoints:
        try:
            field, fields = _open(path, args.field if path.suffix == ".npy" else name)
            records = _records(field, args) if args.gif and not args.checkpoints[1:] else [-1]
            frames += [_frame(field, path.name, args, record) for record in records]
        except (OSError, LookupError, ValueError) as error:
            raise HaloxError(f"{path}: {error.args[-1] if error.args else error}") from error
        # All checkpoints show the field of the first; a .npy file has one field, with its name.
        name = name if path.suffix == ".npy" else field.name
    suffix = ("" if first.suffix == ".npy" else f".{name}") + (".gif" if is_animation else ".png")
    path = args.png or args.gif or first.with_name(first.name + suffix)
    low, high = draw(frames, path, args.log, args.cmap, args.range)
    print(f"{path}: {frames[0].title.splitlines()[0]}, from {low:g} to {high:g}")
    if args.field is None and len(fields) > 1:
        print(f"fields: {', '.join(fields)}")
    return 0


def check_packages(name: str, *packages: str) -> None:
    """Raise `MissingPackageError` unless the packages that ``name`` needs can be imported."""
    for package in packages:
        try:
            import_module(package)
        except ImportError as error:
            raise MissingPackageError(
                f"{name} needs {package} ({error}): pip install matplotlib xarray zarr"
            ) from error


def _open(path: Path, name: str | None) -> tuple[Any, list[str]]:
    """Return a field as a DataArray with the attributes of the checkpoint, and the names of all fields."""
    import xarray

    if path.suffix == ".npy":
        if name not in (None, path.stem):
            raise HaloxError(f"{path} has no field {name}: a .npy file has one field, {path.stem}")
        values = np.lib.format.open_memmap(path, mode="r")
        dims = [*AXES, *(f"axis_{n}" for n in range(len(AXES), values.ndim))][: values.ndim]
        return xarray.DataArray(values, dims=dims, name=path.stem), [path.stem]
    # Decoding would make times of numbers with a unit such as seconds.
    about = path / METADATA
    is_ours = about.is_file() and PREFIX in about.read_text(encoding="utf-8")
    group = xarray.open_zarr(_complete_store(path) if is_ours else path, decode_cf=False)
    variables = {str(name): v for name, v in group.data_vars.items() if "bnds" not in v.dims}
    fields = sorted(name for name, v in variables.items() if TABLE not in v.attrs)
    field = group[name or (fields or sorted(variables))[0]]
    if TABLE in field.attrs:
        raise HaloxError(f"{path}: {field.name} is of particles; halox view draws fields")
    field.attrs = group.attrs
    return field, fields


def _complete_store(path: Path) -> Any:
    """Return the store of a group that halox has written: it has all chunks, and a missing one is an error."""
    from zarr.storage import LocalStore

    class CompleteStore(LocalStore):
        async def get(self, key: str, *args: Any, **kwargs: Any) -> Any:
            """Return the value of a key; raises FileNotFoundError for a missing chunk."""
            value = await super().get(key, *args, **kwargs)
            if value is None and "c" in key.split("/")[1:]:
                raise FileNotFoundError(f"{key} is missing: the checkpoint is damaged")
            return value

    return CompleteStore(path, read_only=True)


def _times(field: Any) -> list[Any]:
    """Return the dimension of an output's records in a list, empty for a checkpoint."""
    return [dim for dim in field.dims[:1] if str(dim).startswith("time")]


def _records(field: Any, args: argparse.Namespace) -> Sequence[int]:
    """Return indices of the records that the options leave, at even distances, with the last one."""
    count = max(
        (field.sizes[dim] for dim in _times(field) if dim not in dict(args.picks)), default=1
    )
    return range(-1, -max(count, 1) - 1, -max(-(-count // _MOST_RECORDS), 1))[::-1]


def _frame(field: Any, where: str, args: argparse.Namespace, record: int) -> Frame:
    """Read the part of a field that the options select, and a record of an output."""
    components = [dim for dim in field.dims if "_component_" in dim]
    picks: dict[Any, Any] = dict.fromkeys(components, 0) | dict.fromkeys(_times(field), record)
    picks |= dict(args.picks)
    if any(field.sizes[dim] == 0 for dim in _times(field)):
        raise HaloxError(f"{where} has no records of {field.name} yet")
    free = [dim for dim in field.dims if dim not in picks]
    if not free:
        raise HaloxError(f"no axis of {field.name} is left to draw; leave out --slice or --project")
    shown = free[:2]
    picks |= {dim: field.sizes[dim] // 2 for dim in free[2:]}
    index = {dim: pick for dim, pick in picks.items() if isinstance(pick, int)}
    for dim, n in index.items():
        if dim in field.dims and not -field.sizes[dim] <= n < field.sizes[dim]:
            raise HaloxError(
                f"--slice {dim}={n}: {field.name} has {field.sizes[dim]} points along {dim}"
            )
    thin = {dim: slice(None, None, -(-field.sizes[dim] // _MOST_POINTS)) for dim in shown}
    part, title = field.isel(index | (thin if len(shown) == 2 else {})), field.name
    if part.dtype.kind == "c":
        part, title = abs(part), f"|{title}|"
    for dim, kind in [(dim, pick) for dim, pick in picks.items() if isinstance(pick, str)]:
        part, title = getattr(part, kind)(dim, skipna=False), f"{kind} of {title} over {dim}"
    if index:
        title += " at " + ", ".join(f"{dim} = {_place(field, dim, i)}" for dim, i in index.items())
    user = {key: value for key, value in field.attrs.items() if not key.startswith("halox_")}
    numbers = [f"{key} {n:g}" for key, n in user.items() if type(n) in (int, float)]
    title += "\n" + ", ".join([where, *numbers[:3]])
    blocks = []
    if args.blocks:
        if not field.attrs.get("halox_blocks"):
            raise HaloxError(f"--blocks: {where} does not record the blocks of its ranks")
        grid_dims = [dim for dim in field.dims if dim not in components]
        ends = np.cumsum(field.attrs["halox_proc_shape"])
        sizes = dict(zip(grid_dims, np.split(field.attrs["halox_blocks"], ends[:-1]), strict=True))
        # A field of one parity has one point for two cells along the last axis.
        blocks = [sizes[d] // (2 if d.endswith(("_even", "_odd")) else 1) for d in shown]
    extents = [field.sizes[dim] for dim in shown]
    steps = [_step(field, dim) for dim in shown]
    return Frame(part.values.astype(float), title, shown, extents, blocks, (), steps)


def _place(field: Any, dim: Any, index: int) -> object:
    """Return the date of a record, and otherwise the index along a dimension."""
    along, calendar = field[dim], field[dim].attrs.get("calendar")
    if calendar is None:
        return index % field.sizes[dim]
    seconds, units = float(along[index]), along.attrs["units"]
    if calendar != "proleptic_gregorian":
        return f"{seconds:.15g} {units} ({calendar})"
    date = np.datetime64(units.split()[-1]) + np.timedelta64(round(seconds * 1e6), "us")
    return np.datetime_as_string(date, "auto")


def _step(field: Any, dim: Any) -> tuple[float, float]:
    """Return the first coordinate along a dimension and the spacing, or those of indices if it has no even spacing."""
    values = field[dim].values
    if values.dtype.kind in "iuf" and len(values) > 1:
        spacing = np.diff(values.astype(float))
        if spacing[0] and np.allclose(spacing, spacing[0], rtol=1e-4, atol=0):
            return float(values[0]), float(np.mean(spacing))
    return 0.0, 1.0


def draw(
    frames: Sequence[Frame], path: Path, log: bool, cmap: str = "viridis", limits: Any = None
) -> tuple[float, float]:
    """Write a picture of one frame, or an animation for a ``.gif``, and return the limits of the colours."""
    from matplotlib.animation import FuncAnimation
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.figure import Figure

    values = np.concatenate([frame.values.ravel() for frame in frames])
    drawn = values[np.isfinite(values) & (values > (0 if log else -np.inf))]
    low, high = limits or ((drawn.min(), drawn.max()) if drawn.size else (0.1, 1))
    low = max(low, high / 10**_DECADES) if log and not limits else low
    norm = (LogNorm if log else Normalize)(low, high, True)
    figure = Figure(layout="compressed")
    try:
        if path.suffix == ".gif":
            animation = FuncAnimation(figure, lambda f: _show(figure, f, cmap, norm), frames)
            animation.save(path, "pillow", fps=5)
        else:
            _show(figure, frames[0], cmap, norm)
            figure.savefig(path)
    except (OSError, ValueError) as error:
        raise HaloxError(f"{path} cannot be drawn: {error}") from error
    return low, high


def _show(figure: Any, frame: Frame, cmap: str, norm: Any) -> None:
    """Draw a frame into a figure, in place of the frame before."""
    from matplotlib.colors import LogNorm
    from matplotlib.patheffects import withStroke

    figure.clear()
    axes = figure.add_subplot(title=frame.title, xlabel=frame.dims[0])
    firsts, steps = zip(*(frame.steps or [(0.0, 1.0)] * len(frame.dims)), strict=True)
    if len(frame.dims) == 1:
        axes.plot(firsts[0] + steps[0] * np.arange(len(frame.values)), frame.values, ".-")
        axes.set_yscale("log" if isinstance(norm, LogNorm) else "linear")
        axes.set_ylim(*((norm.vmin, norm.vmax) if norm.vmin < norm.vmax else ()))
    else:
        # Cell n extends from n - 1/2 to n + 1/2, so that its tick is at its centre.
        x, y = (
            [first + step * (n - 0.5) for n in (0, extent)]
            for first, step, extent in zip(firsts, steps, frame.extents, strict=True)
        )
        long, short = sorted((abs(x[1] - x[0]), abs(y[1] - y[0])), reverse=True)
        aspect = "auto" if long > 4 * short else "equal"
        place: dict[str, Any] = {"origin": "lower", "extent": (*x, *y), "aspect": aspect}
        image = axes.imshow(frame.values.T, cmap, norm, interpolation="nearest", **place)
        axes.set_ylabel(frame.dims[1])
        figure.colorbar(image)
    style = {"color": "white", "path_effects": [withStroke(linewidth=2.4, foreground="black")]}
    lines = zip((axes.axvline, axes.axhline), frame.blocks, firsts, steps, strict=False)
    for draw_line, sizes, first, step in lines:
        for start in np.cumsum(sizes)[:-1]:
            draw_line(first + step * (start - 0.5), linewidth=1.2, **style)
    for column, row, text in frame.labels:
        place = {"xytext": (6, 6), "textcoords": "offset points", "fontweight": "bold"}
        corner = [f + s * (n - 0.5) for f, s, n in zip(firsts, steps, (column, row), strict=True)]
        axes.annotate(text, corner, **place, **style)
