"""Types of CuPy's arrays and memory for type checkers, since CuPy has no annotations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypedDict

from halox.runtime.dlpack import Array, DType

if TYPE_CHECKING:
    import cupy


class XArray(Protocol):
    """Array of NumPy or CuPy."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in bytes."""

    @property
    def ndim(self) -> int:
        """Number of axes."""

    @property
    def dtype(self) -> DType:
        """Type of an element."""

    @property
    def data(self) -> Any:
        """Memory: a buffer, or on a GPU a pointer."""

    def transpose(self, *axes: Any) -> Any:
        """View with the axes in another order."""

    def __getitem__(self, key: Any, /) -> Any:
        """View, or take elements."""

    def __setitem__(self, key: Any, value: Any, /) -> None:
        """Set elements."""


class CupyMemory(Protocol):
    """Memory that CuPy has allocated: the address of its first byte, and its size in bytes."""

    ptr: int
    size: int


class CupyPointer(Protocol):
    """`cupy.cuda.MemoryPointer`: an address within an allocation on a GPU."""

    ptr: int
    mem: CupyMemory
    device_id: int

    def copy_from_device_async(self, source: CupyPointer, nbytes: int, /) -> None:
        """Copy bytes from device memory to this pointer, on the current stream."""

    def memset_async(self, value: int, nbytes: int, /) -> None:
        """Set bytes on the current stream."""


class CupyFlags(Protocol):
    """Flags of a CuPy array: contiguous in C order; contiguous in C or Fortran order."""

    c_contiguous: bool
    forc: bool


class CupyDevice(Protocol):
    """`cupy.cuda.Device`."""

    id: int


class CupyArray(XArray, Protocol):
    """`cupy.ndarray`."""

    size: int
    itemsize: int
    nbytes: int
    flags: CupyFlags
    data: CupyPointer
    device: CupyDevice

    def get(self) -> Array:
        """Copy to the host."""

    def fill(self, value: object) -> None:
        """Set all elements."""

    def set(self, values: Array, /) -> None:
        """Copy from a host array of the same shape and dtype."""

    def copy(self, order: str = "C") -> CupyArray:
        """Copy on the GPU."""

    def astype(self, dtype: object) -> CupyArray:
        """Convert to another dtype."""

    def reshape(self, *shape: object) -> CupyArray:
        """View, or copy, in another shape."""

    def transpose(self, *axes: object) -> CupyArray:
        """View with the axes in another order."""

    def __getitem__(self, key: object, /) -> CupyArray:
        """View, or take elements."""


class CupyEvent(Protocol):
    """`cupy.cuda.Event`, and its address."""

    ptr: int


class CupyFunction(Protocol):
    """`cupy.cuda.Function`, and its address, a CUfunction."""

    ptr: int


class CudaInterface(TypedDict, total=False):
    """``__cuda_array_interface__`` of an array on a GPU."""

    shape: tuple[int, ...]
    typestr: str
    data: tuple[int, bool]
    strides: tuple[int, ...] | None
    descr: list[tuple[str, str]]
    stream: int | None


Field: TypeAlias = Array | CupyArray
"""Array as a grid allocates it: NumPy on the host, CuPy on a GPU."""


class DlpackArray(Protocol):
    """Array of any library that has DLPack."""

    def __dlpack__(self, *args: Any, **options: Any) -> Any:
        """Export the array."""


class CudaArray(Protocol):
    """Array on a GPU of any library that has ``__cuda_array_interface__``."""

    @property
    def __cuda_array_interface__(self) -> Any:
        """Memory and type of the array."""


FieldLike: TypeAlias = DlpackArray | CudaArray
"""Array that a grid takes as a field."""

GpuArray: TypeAlias = "cupy.ndarray"
"""The class itself, for users' code; Any without CuPy."""
