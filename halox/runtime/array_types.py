"""Names of array types for annotations. CuPy has no annotations, so its arrays are `Any` for type checkers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import cupy

CupyArray: TypeAlias = Any
XArray: TypeAlias = Any
"""Array of NumPy or CuPy."""


class DlpackArray(Protocol):
    """Array of any library that has DLPack."""

    def __dlpack__(self, *args: Any, **options: Any) -> Any: ...


class CudaArray(Protocol):
    """Array on a GPU of any library that has ``__cuda_array_interface__``."""

    @property
    def __cuda_array_interface__(self) -> Any: ...


FieldLike: TypeAlias = DlpackArray | CudaArray
"""Array that a grid takes as a field."""

GpuArray: TypeAlias = "cupy.ndarray"
"""The class itself, for users' code; Any without CuPy."""
