"""NCCL through ctypes, for the few functions that halox calls.

CuPy's binding holds the global interpreter lock while a communicator is created or aborted, so no thread could end a
wait that exceeds the time limit. It also accepts only communicators that it has created.

NVIDIA's binding, nccl4py 0.6, releases the lock, and enqueues a group of two operations in 0.3 us, where ctypes takes
0.7 us (both measured with a library whose functions are empty). But none of its calls takes a time limit. Non-blocking
communicators, of NCCL 2.14 and newer, bound only calls of the host, not kernels that wait for other ranks, so the
thread of `halox.runtime.nccl_ranks` would stay. The binding also needs ``cuda-core``, and would replace only the calls
in this module.

The library is the one that the process has already loaded, else the library of ``nvidia-nccl-cu12`` or
``nvidia-nccl-cu13``, else the library of the system.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

from halox.errors import DeviceError

FILE = "libnccl.so.2"
LEAST_VERSION = 21000
"""Version number of NCCL 2.10, the oldest supported version: it supports sends in CUDA graphs."""

_ID_BYTES = 128
_IN_PROGRESS = 7
_UINT8 = 1
_STREAMS = 16  # number of streams with cached calls
_INSTALL = "install it with `pip install nvidia-nccl-cu13` (nvidia-nccl-cu12 for CUDA 12)"


class NcclOp(NamedTuple):
    """A send or receive in a group: device address and size of the buffer, and the peer rank."""

    is_send: bool
    pointer: int
    nbytes: int
    peer: int


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * _ID_BYTES),)


class Nccl:
    """NCCL of version number ``version``; see :func:`load_nccl`. Calls raise `DeviceError` with NCCL's reason."""

    def __init__(self, library: Any) -> None:
        pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        self._text = library.ncclGetErrorString
        self._text.restype = ctypes.c_char_p
        self._last = getattr(library, "ncclGetLastError", None)
        if self._last is not None:
            self._last.argtypes, self._last.restype = (pointer,), ctypes.c_char_p
        self._get_unique_id = library.ncclGetUniqueId
        self._init = library.ncclCommInitRank
        self._init.argtypes = (ctypes.POINTER(pointer), number, _UniqueId, number)
        self._abort = library.ncclCommAbort
        self._abort.argtypes = (pointer,)
        self._async_error = library.ncclCommGetAsyncError
        self._async_error.argtypes = (pointer, ctypes.POINTER(number))
        self._start, self._end = library.ncclGroupStart, library.ncclGroupEnd
        # No argtypes: arguments are converted in advance, which reduces the time of a call to a third.
        self._send, self._recv = library.ncclSend, library.ncclRecv
        self._types = (pointer, size, number, number, pointer, pointer)
        version = number()
        self._check(library.ncclGetVersion(ctypes.byref(version)), "ncclGetVersion")
        self.version = int(version.value)

    def _check(self, code: int, name: str) -> None:
        if not code:
            return
        last = b"" if self._last is None else self._last(None) or b""
        more = f": {last.decode(errors='replace').strip()}" if last else ""
        text = self._text(code).decode(errors="replace")
        raise DeviceError(f"{name} of NCCL: {text}{more}; NCCL_DEBUG=INFO prints more")

    def unique_id(self) -> bytes:
        """Return a new ncclUniqueId, which one rank creates and all ranks of a communicator use."""
        unique_id = _UniqueId()
        self._check(self._get_unique_id(ctypes.byref(unique_id)), "ncclGetUniqueId")
        return bytes(unique_id)

    def make(self, size: int, unique_id: bytes, rank: int) -> int:
        """Create a communicator on the current GPU, and return its address; blocks until all ranks have called it."""
        comm = ctypes.c_void_p()
        named = _UniqueId.from_buffer_copy(unique_id)
        self._check(self._init(ctypes.byref(comm), size, named, rank), "ncclCommInitRank")
        return int(comm.value or 0)

    def abort(self, comm: int) -> None:
        """Abort all operations of a communicator, and free it; waits for graphs that use it."""
        self._abort(comm)

    def failure(self, comm: int) -> str:
        """Return the asynchronous error of a communicator, for example a broken connection; empty without an error."""
        code = ctypes.c_int()
        if self._async_error(comm, ctypes.byref(code)) or code.value in (0, _IN_PROGRESS):
            return ""
        return str(self._text(code.value).decode(errors="replace"))

    def prepared(self, comm: int, ops: Sequence[NcclOp]) -> Callable[[int], None]:
        """Return a function that enqueues a group of sends and receives on a stream, given by its address."""
        start, end = self._start, self._end
        on_streams: dict[int, list[Callable[[], int]]] = {}

        def calls_on(stream: int) -> list[Callable[[], int]]:
            if len(on_streams) >= _STREAMS:
                on_streams.clear()
            calls = on_streams[stream] = [self._call_of(op, comm, stream) for op in ops]
            return calls

        def launch(stream: int) -> None:
            calls = on_streams.get(stream) or calls_on(stream)
            code = start()
            for call in calls:
                code = call() or code
            code = end() or code
            if code:
                self._check(code, "a group of sends and receives")

        return launch

    def _call_of(self, op: NcclOp, comm: int, stream: int) -> Callable[[], int]:
        values = (op.pointer, op.nbytes, _UINT8, op.peer, comm, stream)
        # A null pointer converts to None, which ctypes passes as a null pointer.
        pairs = zip(self._types, values, strict=True)
        converted = [kind.from_param(value) for kind, value in pairs]
        return partial(self._send if op.is_send else self._recv, *converted)


@cache
def load_nccl() -> Nccl:
    """Return the NCCL library; raise `DeviceError` if it is missing or too old."""
    library = _loaded() or _by_pathfinder() or _by_name()
    if library is None:
        raise DeviceError(f"no {FILE} can be loaded; {_INSTALL}")
    try:
        nccl = Nccl(library)
    except AttributeError as error:
        raise DeviceError(f"{FILE} is too old ({error}); {_INSTALL}") from error
    if nccl.version < LEAST_VERSION:
        raise DeviceError(
            f"NCCL {nccl_version_text(nccl.version)} is too old, 2.10 or newer is needed; {_INSTALL}"
        )
    return nccl


def nccl_version_text(number: int) -> str:
    """Return a version number as text.

    Examples
    --------
    >>> nccl_version_text(22907), nccl_version_text(2708)
    ('2.29.7', '2.7.8')
    """
    thousand = 10000 if number >= 10000 else 1000
    return f"{number // thousand}.{number % thousand // 100}.{number % 100}"


def _loaded() -> Any | None:
    with suppress(OSError):
        return ctypes.CDLL(FILE, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    return None


def _by_pathfinder() -> Any | None:
    # cuda.pathfinder is a dependency of NVIDIA's bindings, and finds libraries installed by pip or conda.
    with suppress(Exception):
        import_module("cuda.pathfinder").load_nvidia_dynamic_lib("nccl")
        return _loaded()
    return None


def _by_name() -> Any | None:
    with suppress(OSError):
        return ctypes.CDLL(FILE)
    return None
