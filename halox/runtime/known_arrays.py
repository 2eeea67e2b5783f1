"""Arrays of earlier calls, known by identity.

Plans, reductions, transforms and layouts each keep values for the arrays of their calls. There is one rule for
all of them. A value ends with its arrays. It does not hold for an array whose shape, dtype or permission to be written
has changed, since all three can be assigned; of an array that is not NumPy's only the shape is compared. (Strides can
be assigned, too, but NumPy advises against it, and a comparison would cost time in every call.)
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from halox.runtime.arrays import DType

Value = TypeVar("Value")

_MOST_PASSED = 512


class _Arguments(dict[int, "_Argument"]):
    """Arrays of one position by identity; for an unknown array, an entry that fits no array, cheaper than KeyError."""

    __slots__ = ("__weakref__",)

    def __missing__(self, key: int) -> _Argument:
        return _UNKNOWN


class _Argument:
    """An array object as the next argument of earlier calls.

    ``values`` has, by kind of call, the values of the arrays up to this one; ``following`` has the arrays that followed
    this one.
    """

    __slots__ = ("dtype", "following", "is_numpy", "reference", "shape", "values", "writable")

    def __init__(self, array: object, siblings: _Arguments) -> None:
        key, place = id(array), weakref.ref(siblings)

        def forget(reference: object) -> None:
            table = place()
            if table is not None and key in table and table[key].reference is reference:
                del table[key]

        self.reference = weakref.ref(array, forget)
        self.shape: object = getattr(array, "shape", None)
        self.dtype: DType | None = None
        self.writable: bool | None = None
        self.is_numpy = False
        if isinstance(array, np.ndarray):
            self.is_numpy, self.dtype, self.writable = True, array.dtype, array.flags.writeable
        self.values: dict[Hashable, Any] = {}
        self.following = _NOTHING

    def __len__(self) -> int:
        return len(self.values) + sum(map(len, self.following.values()))

    def fits(self, array: object) -> bool:
        """Whether the array is unchanged; `KnownArrays.find` repeats this code inline, to save the call."""
        return getattr(array, "shape", None) == self.shape and (
            not isinstance(array, np.ndarray)
            or (array.dtype is self.dtype and array.flags.writeable is self.writable)
        )


_NOTHING = _Arguments()
_UNKNOWN = _Argument(_NOTHING, _NOTHING)
_UNKNOWN.shape = _UNKNOWN  # equal to no shape


class KnownArrays(Generic[Value]):
    """Values by the array objects of a call and the kind of call. Holds no array."""

    def __init__(self) -> None:
        self._first = _Arguments()
        self._passed: dict[int, weakref.ref[object]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._first.values()))

    def find(self, kind: Hashable, arrays: Sequence[object]) -> Value | None:
        """Return the value of a call with these arrays, or None; also None for an unhashable kind."""
        arguments, argument = self._first, _UNKNOWN
        array: Any
        try:
            for array in arrays:
                argument = arguments[id(array)]
                if argument.is_numpy:
                    if (
                        array.shape != argument.shape
                        or array.dtype is not argument.dtype
                        or array.flags.writeable is not argument.writable
                    ):
                        return None
                elif getattr(array, "shape", None) != argument.shape:
                    return None
                arguments = argument.following
            return argument.values.get(kind)
        except (TypeError, AttributeError):  # unhashable kinds, and objects that are not arrays
            return None

    def keep(self, kind: Hashable, arrays: Sequence[object], value: Value) -> None:
        """Keep a value for later calls with these arrays; `TypeError` if one does not support weak references."""
        arguments, argument = self._first, None
        for array in arrays:
            if argument is not None:
                if argument.following is _NOTHING:
                    argument.following = _Arguments()
                arguments = argument.following
            argument = arguments.get(id(array))
            if argument is None or not argument.fits(array):
                # A new argument also forgets the arrays that followed this one before it changed.
                argument = arguments[id(array)] = _Argument(array, arguments)
        if argument is not None:
            argument.values[kind] = value

    def passed_before(self, arrays: Sequence[object]) -> bool:
        """Return whether all arrays were passed here before, and remember them.

        To prepare a call for temporaries would cost more than it saves.
        """
        passed, all_passed = self._passed, True
        for array in arrays:
            reference = passed.get(id(array))
            if reference is None or reference() is not array:
                all_passed = False
                if len(passed) >= _MOST_PASSED:
                    passed.clear()
                try:
                    passed[id(array)] = weakref.ref(array)
                except TypeError:  # the type does not support weak references
                    continue
        return all_passed

    def forget(self) -> None:
        """Forget all arrays, so that the next calls examine them again."""
        self._first.clear()
        self._passed.clear()
