"""POSIX shared memory between the ranks of a node: files in /dev/shm, private to the user, unlinked after mapping.

One rank creates a file and passes its name to the other ranks of the node, which attach it. After all have mapped the
file, its creator unlinks the name, so that the system frees the memory even if the ranks are killed.
"""

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


def fence() -> None:
    """Full memory barrier: order all earlier loads and stores before all later ones.

    Acquiring and releasing a lock twice is a full barrier on weakly ordered processors. Earlier accesses stay before
    the first release, and later accesses stay behind the second acquire. Each call makes a new lock, since a finalizer
    may interrupt it and call `fence` too.
    """
    lock = Lock()
    for _ in range(2):
        lock.acquire()
        lock.release()


NEEDS_FENCE = platform.machine() not in ("x86_64", "AMD64", "i686")
"""Whether other ranks see stores in program order only with `fence`; x86 processors guarantee the order."""


def new_name() -> str:
    """Return a name that no other file has."""
    return f"halox-{os.getuid()}-{uuid4().hex}"


def rounded(nbytes: int) -> int:
    """Return a number of bytes rounded up to whole pages, at least one."""
    return rounded_up(max(nbytes, 1), PAGE)


def space_left() -> int:
    """Return the free shared memory in bytes, 0 if the system has none."""
    try:
        status = os.statvfs(FOLDER)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


class SharedSegment:
    """A mapped file of shared memory; ``memory`` is a byte array over it.

    The mapping ends with the last view of it. The system frees the memory once no rank maps the file and the file is
    unlinked.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        self.mapping = mapping
        self.memory: Bytes = np.frombuffer(mapping, np.uint8)
        self.nbytes = len(mapping)

    @cached_property
    def start(self) -> int:
        return int(self.memory.ctypes.data)


def create(name: str, nbytes: int) -> SharedSegment:
    """Create a file of shared memory, allocate all its pages, and map it.

    Raises OSError, and leaves no file, if there is too little shared memory or no /dev/shm.
    """
    path = os.path.join(FOLDER, name)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    handle = os.open(path, flags, 0o600)
    try:
        size = rounded(nbytes)
        os.ftruncate(handle, size)
        os.posix_fallocate(handle, 0, size)
        return SharedSegment(mmap.mmap(handle, size))
    except BaseException:
        unlink(name)
        raise
    finally:
        os.close(handle)


def attach(name: str) -> SharedSegment:
    """Map a file that another rank has created; raise OSError if it is missing or cannot be mapped."""
    handle = os.open(f"{FOLDER}/{name}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return SharedSegment(mmap.mmap(handle, os.fstat(handle).st_size))
    finally:
        os.close(handle)


def unlink(name: str) -> None:
    """Remove a file's name; harmless when repeated."""
    with suppress(OSError):
        os.unlink(os.path.join(FOLDER, name))
