"""The grid's reductions: combined in the order of the ranks, the same bits on every rank."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from halox.collectives.host.mpi_reduction import OrderedReduction
from halox.collectives.operations import find_operation
from halox.decomposition import FieldSpec
from halox.errors import FieldError, MismatchError, as_halox_error
from halox.runtime.arrays import Described
from halox.runtime.world import World

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
        Returns this rank's value, a NumPy scalar; its fields' dtypes, and their layout. May raise, whereupon all ranks
        raise a `HaloxError`.
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
    Collective; blocks the host. Combining the ranks' values raises no floating-point errors, whatever NumPy is told
    to do about them: the result is then infinite or NaN, on all ranks.
    """
    error: Exception | None = None
    mine: tuple[str, bytes] | None = None
    try:
        number, dtypes, spec = local()
        value = np.asarray(number)
        mine = (
            f"{dtypes} {spec.digest}",
            value.tobytes(),
        )  # the value's dtype follows from the fields'
    except Exception as caught:
        error = as_halox_error(caught, "a reduction")
    found: list[tuple[str, bytes]] = world.gather(mine, "a reduction", error)
    if len({what for what, _ in found}) > 1:
        names = ", ".join(str(np.dtype(name)) for name in dtypes.split(","))
        world.compare({"the field reduced": f"{names}, {spec}"}, "a reduction")
    with np.errstate(all="ignore"):
        return COMBINE[op](np.frombuffer(b"".join([raw for _, raw in found]), value.dtype))


def reduce_array(world: World, array: np.ndarray[Any, Any], op: str) -> np.ndarray[Any, Any]:
    """Combine host arrays of one shape and dtype element by element, in the order of the ranks.

    Parameters
    ----------
    world : World
    array : ndarray
    op : str
        As of `find_operation`.

    Returns
    -------
    ndarray
        A new array; the same bits on every rank.

    Raises
    ------
    MismatchError
        If shapes, dtypes or operations differ between ranks.
    HaloxError
        On all ranks, if one of them cannot take part.
    ExchangeTimeoutError
        If a rank does not come.

    Notes
    -----
    Collective; blocks. Arrays on a GPU go through `halox.collectives.device.device_fields`.
    """
    error: Exception | None = None
    try:
        operation = find_operation(op, array.dtype)
        combine = OrderedReduction(
            world.data_comm, world.wait_all, operation, array.dtype, array.size
        )
        source = np.ascontiguousarray(array).reshape(-1)
        result = np.empty(array.shape, array.dtype)
    except Exception as caught:
        error = as_halox_error(caught, "an allreduce")
    said = world.gather(((array.shape, array.dtype.str), op), "an allreduce", error)
    for name, parts in zip(("shape and dtype", "operation"), zip(*said, strict=True), strict=True):
        other = next((rank for rank, part in enumerate(parts) if part != parts[0]), None)
        if other is not None:
            raise MismatchError(
                f"allreduce needs the same {name} on all ranks: rank 0 gave {parts[0]}, rank {other} {parts[other]}"
            )
    combine(source, result.reshape(-1))
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
