"""Exceptions of halox: `HaloxError` and its subclasses, each also a subclass of a standard exception."""

from __future__ import annotations

import os
from collections.abc import Callable


class HaloxError(Exception):
    """Base of all errors of this package."""

    of_one_rank = False
    """Whether a function of the user has raised the error within a collective call, so on this rank alone."""


class DatatypeError(HaloxError, ValueError):
    """A datatype's arguments break MPI's rules, or a type does not fit its use."""


class DecompositionError(HaloxError, ValueError):
    """A grid cannot be divided as asked: shapes, process grid, halo widths."""


class FieldError(HaloxError, ValueError):
    """An array does not fit its grid or datatype: shape, strides, dtype, memory, device."""


class MismatchError(HaloxError, ValueError):
    """Ranks differ in arguments, datatype signatures or message lists that must be the same."""


class PathError(HaloxError, ValueError):
    """The requested data path cannot be used; the message says why."""


class DeviceError(HaloxError, RuntimeError):
    """No GPU, no CuPy, or an array on another device than the grid's."""


class MissingPackageError(HaloxError, ImportError):
    """An optional package is needed but not installed; the message names it."""


class ClosedError(HaloxError, RuntimeError):
    """An object was used after ``close()``, or after ``MPI.Finalize``."""


class StateError(HaloxError, RuntimeError):
    """A call is invalid in the current state: ``finish`` without ``start``, a stream capture, another thread's call."""


class CheckpointError(HaloxError, OSError):
    """A checkpoint cannot be written or read: damaged, of another grid, in use, no space; the message says why."""


class ExchangeTimeoutError(HaloxError, TimeoutError):
    """A rank waited ``HALOX_TIMEOUT`` seconds for a neighbour that did not arrive."""


def stripped(error: HaloxError) -> HaloxError:
    """Remove halox's frames from the traceback of an error of a public call, and halox's errors from its causes.

    The first cause that is no `HaloxError` stays. ``HALOX_DEBUG=1`` keeps everything.
    """
    if os.environ.get("HALOX_DEBUG") != "1":
        cause: BaseException | None = error
        while isinstance(cause, HaloxError):
            cause = cause.__cause__
        error.__cause__, error.__traceback__ = cause, None
    return error


def as_halox_error(error: Exception, step: str) -> HaloxError:
    """Return the error itself if it is a `HaloxError`, else a new `HaloxError` that names the error as its cause.

    Examples
    --------
    >>> as_halox_error(ZeroDivisionError("division by zero"), "a reduction")
    HaloxError('a reduction failed: ZeroDivisionError: division by zero')
    """
    if isinstance(error, HaloxError):
        return error
    halox_error = HaloxError(f"{step} failed: {type(error).__name__}: {error}")
    halox_error.__cause__ = error
    return halox_error


def raising(error: Exception | None) -> Callable[[], None]:
    """Return a function that raises an error, if there is one."""

    def call() -> None:
        if error is not None:
            raise error

    return call
