"""Interface of an allreduce of arrays of one shape and dtype: `HostAllreduce` and `DeviceAllreduce` implement it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from halox.collectives.operations import check_writable
from halox.errors import FieldError
from halox.runtime.arrays import Described, DType


class ArrayReduction(ABC):
    """Combines arrays of all ranks; the constructor, calls and `close` are collective. See `halox.Allreduce`."""

    algorithm: str
    captures = False

    def __init__(self, shape: tuple[int, ...], dtype: DType) -> None:
        self.shape, self.dtype = shape, dtype
        self.reasons: dict[str, str] = {}

    @abstractmethod
    def __call__(self, array: object, out: object = None) -> Any:
        """Return ``out``, or a new array in the memory of ``array``; a NumPy scalar for a scalar."""

    @abstractmethod
    def refuse(self, error: Exception) -> None:
        """Raise the error that keeps this rank out of a call: on all ranks if the host takes part, else only here."""

    @abstractmethod
    def close(self) -> None:
        """Free memory and communicators; collective."""

    def _check(self, described: Described, name: str) -> None:
        if tuple(described.shape) != self.shape or described.dtype != self.dtype:
            raise FieldError(
                f"{name}: got shape {tuple(described.shape)} of {described.dtype}, this allreduce is of shape "
                f"{self.shape} of {self.dtype}; make another one for other arrays"
            )
        if name == "out":
            check_writable(described)
