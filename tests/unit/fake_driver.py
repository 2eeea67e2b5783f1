"""``fake_libcuda.c``, compiled, in the place of the NVIDIA driver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from halox.runtime.gpu import driver, libcuda
from tests.unit.cpu_kernels import compiled_once

SOURCE = Path(__file__).with_name("fake_libcuda.c")
FLAGS = ("-x", "c", "-std=c11", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")
CAPTURED = 7
STREAM = 0x5000
COUNTERS = ("calls_1d", "calls_2d", "calls_3d", "calls_batch")
_LONG = ("allocation", "allocation_bytes", "last_stream")


def compiled(form: int, without: tuple[str, ...] = ()) -> Path:
    """The library of a driver with the form of batched copies, and without some functions."""
    renamed = [f"-D{name}=no_{name}" for name in without]
    return compiled_once(SOURCE.read_text(), *FLAGS, f"-DFORM={form}", *renamed)


class FakeDriver:
    """What the library counts and lets itself be told."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __getitem__(self, name: str) -> int:
        return self._variable(name).value

    def __setitem__(self, name: str, value: int) -> None:
        self._variable(name).value = value

    def counts(self) -> tuple[int, ...]:
        """Calls of each kind of copy since the last time."""
        found = tuple(self[name] for name in COUNTERS)
        for name in COUNTERS:
            self[name] = 0
        return found

    def _variable(self, name: str):
        kind = ctypes.c_uint64 if name in _LONG else ctypes.c_int
        return kind.in_dll(self._library, name)


def forget() -> None:
    """Let halox look for the driver again."""
    for found in (libcuda.library, libcuda.function, driver._batch_function):
        found.cache_clear()


@contextmanager
def fake_driver(form: int = 2, without: tuple[str, ...] = ()) -> Iterator[FakeDriver]:
    """Put the library in the driver's place."""
    path = compiled(form, without)
    with patch.object(libcuda, "LIBRARY", str(path)):
        forget()
        try:
            fake = FakeDriver(libcuda.library())
            fake.counts()
            for name in ("next_error", "kind", "managed", "ordinal", "allocation_bytes"):
                fake[name] = 0
            yield fake
        finally:
            forget()
