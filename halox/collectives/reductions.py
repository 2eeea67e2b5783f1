"""The grid's reductions: combined in the order of the ranks, the same bits on every rank."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from math import prod
from typing import Any

import numpy as np

from halox.collectives.ordered import OrderedReduction
from halox.engine.arrays import Described
from halox.engine.operations import find_operation
from halox.errors import FieldError, MismatchError, as_halox_error
from halox.world import World

_RECORD = np.dtype([("ok", "i8"), ("kind", "S8"), ("value", "V32")])
_ARRAY = np.dtype([("ok", "i8"), ("digest", "S32"), ("what", "S216"), ("op", "S16")])

COMBINE: dict[str, Callable[[Any], Any]] = {
    "sum": np.sum,
    "prod": np.prod,
    "min": np.min,
    "max": np.max,
}
"""Reduction operations by name, over an array of one value a rank."""


def reduce_scalar(world: World, local: Callable[[], Any], op: str) -> Any:
    """Combine one value a rank.

    Parameters
    ----------
    world : World
        The ranks.
    local : callable
        Returns this rank's value, a NumPy scalar; may raise, whereupon all ranks raise a `HaloxError`.
    op : {"sum", "prod", "min", "max"}

    Returns
    -------
    numpy scalar
        The same bits on every rank.

    Notes
    -----
    Collective; blocks the host. Combining the ranks' values raises no floating-point errors, whatever NumPy is told
    to do about them: the result is then infinite or NaN, on all ranks.
    """
    record = np.zeros(1, _RECORD)
    error: Exception | None = None
    try:
        value = np.asarray(local())
        record["ok"] = 1
        record["kind"] = value.dtype.str.encode()
        record["value"] = value.tobytes().ljust(32, b"\0")
    except Exception as caught:
        error = as_halox_error(caught, "a reduction")
    gathered = np.zeros(world.size, _RECORD)
    request = world.comm.Iallgather(record.view(np.uint8), gathered.view(np.uint8))
    world.wait([request], "in a reduction for the other ranks")
    if not gathered["ok"].all():
        world.agree(error, "a reduction")
    kinds = [kind.decode() for kind in gathered["kind"].tolist()]
    if len(set(kinds)) > 1:
        other = next(rank for rank, kind in enumerate(kinds) if kind != kinds[0])
        raise MismatchError(
            f"a reduction needs the same dtype on all ranks: rank 0 has {kinds[0]}, rank {other} has "
            f"{kinds[other]}"
        )
    dtype = np.dtype(kinds[0])
    values = np.frombuffer(
        b"".join(raw.tobytes()[: dtype.itemsize] for raw in gathered["value"]), dtype
    )
    with np.errstate(all="ignore"):
        return COMBINE[op](values)


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
    Collective; blocks. Arrays on a GPU go through `halox.collectives.device_numbers`.
    """
    what = str((array.shape, array.dtype.str)).encode()
    error: Exception | None = None
    mine, gathered = np.zeros(1, _ARRAY), np.zeros(world.size, _ARRAY)
    try:
        operation = find_operation(op, array.dtype)
        combine = OrderedReduction(world.comm, world.wait, operation, array.dtype, array.size)
        source = np.ascontiguousarray(array).reshape(-1)
        result = np.empty(array.shape, array.dtype)
        mine[0] = 1, blake2b(what, digest_size=16).hexdigest(), what, op.encode()
    except Exception as caught:
        error = as_halox_error(caught, "an allreduce")
    request = world.comm.Iallgather(mine.view(np.uint8), gathered.view(np.uint8))
    world.wait([request], "in an allreduce for the other ranks")
    if not gathered["ok"].all():
        world.agree(error, "an allreduce")
    for key, shown, name in (("digest", "what", "shape and dtype"), ("op", "op", "operation")):
        differing = np.flatnonzero(gathered[key] != gathered[key][0])
        if len(differing):
            first, other = (gathered[shown][rank].decode() for rank in (0, differing[0]))
            raise MismatchError(
                f"allreduce needs the same {name} on all ranks: rank 0 gave {first}, rank {differing[0]} {other}"
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
