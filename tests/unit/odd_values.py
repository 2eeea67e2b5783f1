"""Unsuitable values for arguments, to check that every argument is validated."""

from __future__ import annotations

from typing import Any

import numpy as np

_NUMBERS = [True, 0, -3, 2**31, 2**62, 2**63, 10**30, 2.5, float("nan"), 1 + 2j, np.float32(1.5)]
_TEXTS = ["no", "", b"\xff", np.str_("f8"), np.datetime64("2026-01-01")]
_LISTS = [
    *([], [1, "a", None], [[1, 2], [3]], [2**62, 2**63], [-1, -1], [True, False], [1.0, 2.0]),
    *([None, None], [1] * 100, {"a": 1}, {1, 2}, range(3), slice(None)),
]
_OBJECTS = [None, ..., int, len, np, ValueError("odd"), object()]
_DTYPES = [np.dtype(one) for one in ("f4", "i4,f8", "O", ("f4", (2, 3)))]
_ARRAYS = {
    "0-d array": np.array(3),
    "0-d bool": np.array(True),
    "empty array": np.zeros((0, 3)),
    "1-d array": np.zeros(5),
    "one number": np.array([3]),
    "5-d array": np.zeros((2,) * 5),
    "bool array": np.array([True, False]),
    "object array": np.array([1, "a", None], object),
    "text array": np.array(["a", "bc"]),
    "structured array": np.zeros(3, "i4,f8"),
    "masked array": np.ma.masked_array([1.0, 2.0], [True, False]),
    "array with gaps": np.zeros((6, 14))[:, ::2],
    "backwards": np.zeros((6, 7))[::-1],
    "read-only": np.broadcast_to(1.0, (6, 7)),
    "big-endian": np.zeros((6, 7), ">f8"),
}

ODD: dict[str, Any] = _ARRAYS | {
    repr(value): value for value in (*_NUMBERS, *_TEXTS, *_LISTS, *_OBJECTS, *_DTYPES)
}
"""Values by name."""
