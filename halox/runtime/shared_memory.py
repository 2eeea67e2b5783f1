"""POSIX shared memory between the ranks of a node: files below /dev/shm, private to the user, unlinked at once."""

from __future__ import annotations

import mmap
import os
import platform
from contextlib import suppress
from functools import cached_property
from threading import Lock
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from halox.values import rounded_up

Bytes = npt.NDArray[np.uint8]

FOLDER = "/dev/shm"
"""Folder of the files."""

PAGE = mmap.PAGESIZE

_HUGE_BYTES = 4 << 20
_HUGE_SETTING = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23


def fence() -> None:
    """Order loads and stores before and after.

    Taking and releasing a lock twice is a full barrier on processors of weak order: nothing moves before the first
    release together with behind the second taking. It is a new lock, since a finalizer may need a fence in between.
    """
    lock = Lock()
    for _ in range(2):
        lock.acquire()
        lock.release()


NEEDS_FENCE = platform.machine() not in ("x86_64", "AMD64", "i686")
"""Whether `fence` must enforce the order in which other ranks see stores: x86 processors keep it by themselves."""


def new_name() -> str:
    """Return a name that no other file has."""
    return f"halox-{os.getuid()}-{uuid4().hex}"


def rounded(nbytes: int) -> int:
    """Return a number of bytes rounded up to whole pages, at least one."""
    return rounded_up(max(nbytes, 1), PAGE)


def space_left() -> int:
    """Return the bytes of shared memory that are free, 0 where there is none."""
    try:
        status = os.statvfs(FOLDER)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


class SharedSegment:
    """A mapped file of shared memory, as an array ``memory`` of bytes.

    The mapping ends with the last view of it; the memory is free once no rank maps it and it has no name.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping: mmap.mmap | None = mapping
        self.memory: Bytes = np.frombuffer(mapping, np.uint8)
        self.nbytes = len(mapping)

    @cached_property
    def start(self) -> int:
        """Its address in this process."""
        return int(self.memory.ctypes.data)

    def trim(self) -> None:
        """Return the pages to the system; the contents are zeros afterwards."""
        if self._mapping is not None:
            with suppress(OSError, AttributeError):
                self._mapping.madvise(mmap.MADV_REMOVE)

    def fill(self) -> None:
        """Take all pages from the system; raise OSError if there is too little shared memory."""
        if self._mapping is not None:
            try:
                self._mapping.madvise(_MADV_POPULATE_WRITE)
            except OSError as error:
                if error.errno != 22:  # kernels before Linux 5.14 do not know the advice
                    raise
                if space_left() < self.nbytes:
                    raise


def create(name: str, nbytes: int) -> SharedSegment:
    """Make a file of shared memory, all of its pages taken from the system, and map it.

    Raises OSError, and leaves no file, if there is too little shared memory or none.
    """
    path = os.path.join(FOLDER, name)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    handle = os.open(path, flags, 0o600)
    try:
        size = rounded(nbytes)
        os.ftruncate(handle, size)
        if size >= _HUGE_BYTES and _has_huge_pages():
            segment = SharedSegment(mmap.mmap(handle, size))
            assert segment._mapping is not None
            with suppress(OSError):
                segment._mapping.madvise(_MADV_HUGEPAGE)
                segment._mapping.madvise(_MADV_POPULATE_WRITE)
                return segment
        os.posix_fallocate(handle, 0, size)
        return SharedSegment(mmap.mmap(handle, size))
    except BaseException:
        unlink(name)
        raise
    finally:
        os.close(handle)


def attach(name: str) -> SharedSegment:
    """Map a file that another rank has made; raise OSError if it is missing or may not be mapped."""
    handle = os.open(os.path.join(FOLDER, name), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return SharedSegment(mmap.mmap(handle, os.fstat(handle).st_size))
    finally:
        os.close(handle)


def unlink(name: str) -> None:
    """Remove a file's name; harmless when repeated."""
    with suppress(OSError):
        os.unlink(os.path.join(FOLDER, name))


def _has_huge_pages() -> bool:
    try:
        with open(_HUGE_SETTING, encoding="ascii") as file:
            return "[never]" not in file.read()
    except OSError:
        return False
