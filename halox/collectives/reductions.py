"""The grid's reductions: combined in the order of the ranks, the same bits on every rank."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from halox.collectives.ordered import OrderedReduction
from halox.decomposition import FieldSpec
from halox.engine.arrays import Described
from halox.engine.operations import find_operation
from halox.errors import FieldError, HaloxError, MismatchError
from halox.world import World

_RECORD = np.dtype([("value", "V32"), ("what", "S32"), ("ok", "i8")])

COMBINE: dict[str, Callable[[Any], Any]] = {
    "sum": np.sum,
    "prod": np.prod,
    "min": np.min,
    "max": np.max,
}
"""Reduction operations by name, over an array of one value a rank."""


def reduce_scalar(world: World, local: Callable[[], tuple[Any, str, FieldSpec]], op: str) -> Any:
    """Combine one value a rank, of fields of one dtype and layout.

    Parameters
    ----------
    world : World
        The ranks.
    local : callable
        Returns this rank's value, a NumPy scalar; its fields' dtypes, and their layout. May raise a `HaloxError`, which
        all ranks then raise.
    op : {"sum", "prod", "min", "max"}

    Returns
    -------
    numpy scalar
        The same bits on every rank.

    Raises
    ------
    MismatchError
        If dtypes or layouts differ between ranks; names both.

    Notes
    -----
    Collective; blocks the host.
    """
    record = np.zeros(1, _RECORD)
    error: HaloxError | None = None
    try:
        found, dtypes, spec = local()
        value = np.asarray(found)
        record["ok"] = 1
        record["what"] = f"{dtypes} {spec.digest}".encode()  # the value's dtype follows
        record["value"] = value.tobytes().ljust(32, b"\0")
    except HaloxError as caught:
        error = caught
    gathered = np.zeros(world.size, _RECORD)
    request = world.comm.Iallgather(record.view(np.uint8), gathered.view(np.uint8))
    world.wait([request], "in a reduction for the other ranks")
    if not gathered["ok"].all():
        world.agree(error, "a reduction")
    if len(set(gathered["what"].tolist())) > 1:
        names = ", ".join(str(np.dtype(name)) for name in dtypes.split(","))
        world.compare({"the field reduced": f"{names}, {spec}"}, "a reduction")
    dtype = value.dtype
    values = np.ndarray(world.size, dtype, gathered.data, 0, (_RECORD.itemsize,)).copy()
    return COMBINE[op](values)


def reduce_array(world: World, array: np.ndarray[Any, Any], op: str) -> np.ndarray[Any, Any]:
    """Combine host arrays of one shape and dtype element by element, in the order of the ranks; collective.

    Arrays on a GPU go through `halox.collectives.device_numbers`.
    """
    shapes = world.comm.allgather((array.shape, array.dtype.str, op))
    if len(set(shapes)) > 1:
        other = next(rank for rank, shape in enumerate(shapes) if shape != shapes[0])
        last = 3 if shapes[0][:2] == shapes[other][:2] else 2
        what = "operation" if last == 3 else "shape and dtype"
        raise MismatchError(
            f"allreduce needs the same {what} on all ranks: rank 0 gave {shapes[0][:last]}, rank {other} "
            f"{shapes[other][:last]}"
        )
    operation = find_operation(op, array.dtype)
    combine = OrderedReduction(world.comm, world.wait, operation, array.dtype, array.size)
    result = np.empty_like(array)
    combine(np.ascontiguousarray(array).reshape(-1), result.reshape(-1))
    return result


def check_out(out: Described, shape: tuple[int, ...] | None, dtype: np.dtype[Any]) -> None:
    """Refuse an array that a result does not fit in.

    Parameters
    ----------
    out : Described
    shape : tuple of int or None
        Of the result; None for one element, in an array of any axes.
    dtype : numpy.dtype

    Raises
    ------
    FieldError
        If its shape or dtype is another one, or it is read-only.
    """
    fits = prod(out.shape) == 1 if shape is None else tuple(out.shape) == tuple(shape)
    if not fits or out.dtype != dtype:
        wanted = "one element" if shape is None else f"shape {tuple(shape)}"
        raise FieldError(
            f"out: got shape {tuple(out.shape)} of {out.dtype}, the result is {wanted} of {dtype}"
        )
    if not out.writable:
        raise FieldError("out is read-only; the result cannot be written")


def check_ordered(dtype: np.dtype[Any], op: str) -> None:
    """Refuse "min" and "max" of values that have no order.

    Raises
    ------
    FieldError
        If the dtype is complex or structured.
    """
    if op in ("min", "max") and dtype.kind not in "biuf":
        raise FieldError(f"{op} has no meaning for dtype {dtype}; reduce a real-valued field")


def check_numeric(dtype: np.dtype[Any], op: str) -> None:
    """Refuse reductions of what is not a number.

    Raises
    ------
    FieldError
        If the dtype is not bool, integer, float or complex.
    """
    if dtype.kind not in "biufc":
        raise FieldError(f"{op} has no meaning for dtype {dtype}; use a bool or number dtype")


def wide_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which sums over a dtype are formed."""
    if dtype.kind == "c":
        return np.dtype(np.result_type(dtype, "c16"))
    if dtype.kind == "f":
        return np.dtype(np.result_type(dtype, "f8"))
    return np.dtype("u8" if dtype.kind == "u" else "i8")
