"""Every error that halox raises on purpose."""

from __future__ import annotations


class HaloxError(Exception):
    """Base of all errors of this package."""


class DatatypeError(HaloxError, ValueError):
    """A datatype's arguments break MPI's rules, or a type does not fit its use."""


class DecompositionError(HaloxError, ValueError):
    """A grid cannot be divided as asked: shapes, process grid, halo widths."""


class FieldError(HaloxError, ValueError):
    """An array does not fit its grid or datatype: shape, strides, dtype, memory, device."""


class MismatchError(HaloxError, ValueError):
    """Ranks that must agree do not: arguments, datatype signatures, message lists."""


class PathError(HaloxError, ValueError):
    """A data path was asked for that cannot be used here; the text says why."""


class DeviceError(HaloxError, RuntimeError):
    """No GPU, no CuPy, or an array on another device than the grid's."""


class MissingPackageError(HaloxError, ImportError):
    """An optional package is needed and not installed; the text names it."""


class ClosedError(HaloxError, RuntimeError):
    """An object was used after ``close()``, or after ``MPI.Finalize``."""


class StateError(HaloxError, RuntimeError):
    """A call that is impossible now: ``finish`` without ``start``, in a stream capture, or beside another thread's."""


class CheckpointError(HaloxError, OSError):
    """A checkpoint cannot be written or read: damaged, of another grid, in use, no space; the text says which."""


class ExchangeTimeoutError(HaloxError, TimeoutError):
    """A rank waited ``HALOX_TIMEOUT`` seconds for a neighbour that did not arrive."""


def as_halox_error(error: Exception, doing: str) -> HaloxError:
    """Return an error of this package: the error itself, or one that names and is caused by it.

    Examples
    --------
    >>> as_halox_error(ZeroDivisionError("division by zero"), "a reduction")
    HaloxError('a reduction failed: ZeroDivisionError: division by zero')
    """
    if isinstance(error, HaloxError):
        return error
    found = HaloxError(f"{doing} failed: {type(error).__name__}: {error}")
    found.__cause__ = error
    return found
