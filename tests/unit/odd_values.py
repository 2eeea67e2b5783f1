"""Unsuitable values for arguments, to check that every argument is validated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np


def _raising(*names: str) -> Any:
    """Return an object with methods that raise a KeyError."""

    def fail(self: Any, *_: Any, **__: Any) -> Any:
        raise KeyError("this object raises")

    return type("Raising", (), dict.fromkeys(names, fail))()


class _Property:
    """An object with an array interface that raises on access."""

    @property
    def __cuda_array_interface__(self) -> Any:
        raise KeyError("this object raises")

    @property
    def __array_interface__(self) -> Any:
        raise KeyError("this object raises")

    @property
    def dtype(self) -> Any:
        raise KeyError("this object raises")


def _recursive() -> list[Any]:
    found: list[Any] = [1]
    found.append(found)
    return found


def _read_only() -> np.ndarray:
    found = np.zeros((6, 7))
    found.setflags(write=False)
    return found


ODD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "np.False_": lambda: np.False_,
    "float": lambda: 2.5,
    "whole float": lambda: 2.0,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "complex": lambda: 1 + 2j,
    "zero": lambda: 0,
    "one": lambda: 1,
    "negative": lambda: -3,
    "2**31": lambda: 2**31,
    "2**62": lambda: 2**62,
    "2**63": lambda: 2**63,
    "-2**63": lambda: -(2**63),
    "10**30": lambda: 10**30,
    "np.int8": lambda: np.int8(2),
    "np.uint64": lambda: np.uint64(2**64 - 1),
    "np.float32": lambda: np.float32(1.5),
    "np.datetime64": lambda: np.datetime64("2026-01-01"),
    "np.str_": lambda: np.str_("f8"),
    "np.void": lambda: np.zeros((), "i4,f8")[()],
    "Decimal": lambda: Decimal(3),
    "Fraction": lambda: Fraction(3, 2),
    "text": lambda: "no",
    "empty text": lambda: "",
    "lone surrogate": lambda: "\ud800",
    "long text": lambda: "x" * 10_000,
    "bytes": lambda: b"\xff",
    "bytearray": lambda: bytearray(8),
    "memoryview": lambda: memoryview(bytes(8)),
    "empty list": list,
    "mixed list": lambda: [1, "a", None, 2.5, []],
    "nested list": lambda: [[1, 2], [3]],
    "deep list": lambda: [[[[[[1]]]]]],
    "recursive list": _recursive,
    "list of huge": lambda: [2**62, 2**63, 10**30],
    "list of negative": lambda: [-1, -1],
    "list of bools": lambda: [True, False],
    "list of floats": lambda: [1.0, 2.0],
    "list of None": lambda: [None, None],
    "long list": lambda: [1] * 1000,
    "dict": lambda: {"a": 1},
    "set": lambda: {1, 2},
    "slice": lambda: slice(None),
    "Ellipsis": lambda: ...,
    "range": lambda: range(3),
    "generator": lambda: (n for n in (1, 2)),
    "endless": itertools.count,
    "class": lambda: int,
    "own class": lambda: _Property,
    "lambda": lambda: lambda: 1,
    "module": lambda: math,
    "exception": lambda: ValueError("odd"),
    "object": object,
    "no length": lambda: _raising("__len__", "__getitem__"),
    "no iteration": lambda: _raising("__iter__"),
    "no index": lambda: _raising("__index__", "__int__", "__float__"),
    "no array": lambda: _raising("__array__"),
    "no truth": lambda: _raising("__bool__"),
    "no text": lambda: _raising("__repr__", "__str__"),
    "no comparison": lambda: _raising("__eq__", "__lt__", "__gt__", "__le__", "__ge__", "__hash__"),
    "no attributes": lambda: _raising("__getattr__"),
    "no memory": lambda: _raising("__dlpack__", "__dlpack_device__"),
    "no capsule": lambda: type(
        "Tensor", (), {"__dlpack_device__": lambda _: (1, 0), "__dlpack__": lambda *_, **__: 3}
    )(),
    "raising properties": _Property,
    "wrong interface": lambda: SimpleNamespace(__cuda_array_interface__={"shape": "?"}),
    "0-d array": lambda: np.array(3),
    "0-d bool": lambda: np.array(True),
    "empty array": lambda: np.zeros((0, 3)),
    "1-d array": lambda: np.zeros(5),
    "one number": lambda: np.array([3]),
    "5-d array": lambda: np.zeros((2,) * 5),
    "bool array": lambda: np.array([True, False]),
    "object array": lambda: np.array([1, "a", None], object),
    "text array": lambda: np.array(["a", "bc"]),
    "structured array": lambda: np.zeros(3, "i4,f8"),
    "masked array": lambda: np.ma.masked_array([1.0, 2.0], [True, False]),
    "matrix of gaps": lambda: np.zeros((6, 14))[:, ::2],
    "backwards": lambda: np.zeros((6, 7))[::-1],
    "broadcast": lambda: np.broadcast_to(1.0, (6, 7)),
    "read-only": _read_only,
    "big-endian": lambda: np.zeros((6, 7), ">f8"),
    "dtype": lambda: np.dtype("f4"),
    "structured dtype": lambda: np.dtype("i4,f8"),
    "object dtype": lambda: np.dtype("O"),
    "subarray dtype": lambda: np.dtype(("f4", (2, 3))),
}
"""Functions that return a fresh value, by name."""
