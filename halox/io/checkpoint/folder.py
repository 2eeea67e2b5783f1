"""Atomic replacement of a file or folder by a new one, with one writer at a time.

One rank replaces the path. All names are in the path's parent folder, so that renaming copies no data::

    run.zarr               the last checkpoint, until the new checkpoint takes its name
    .run.zarr.ID.partial   the new checkpoint during the write; the next run removes the remains of a dead run
    .run.zarr.lock         locked by the writing run; the kernel releases the lock if the run dies
    .run.zarr.previous     the last checkpoint between two renames, on file systems that cannot exchange names
    run.1.zarr             an earlier checkpoint; an attribute of its group has its former name, run.zarr

ID differs from save to save: a late write of a failed save cannot change the files of the next one.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from halox.errors import CheckpointError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_UNLOCKABLE = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)

_HELD: set[Path] = set()
"""Paths that this process has locked."""

METADATA = "zarr.json"
_KEPT_OF = "halox_kept_of"


def beside(path: Path, what: str) -> Path:
    """Return a hidden name in the same folder as a path: its "lock" or "previous", or one that ends in "partial"."""
    return path.with_name(f".{path.name}.{what}")


def earlier(path: Path, n: int) -> Path:
    """Return the name of an earlier checkpoint of a path; 1 is the latest of them.

    Examples
    --------
    >>> earlier(Path("run.zarr"), 1).name
    'run.1.zarr'
    """
    return path.with_name(f"{path.stem}.{n}{path.suffix}")


def remains(path: Path) -> list[Path]:
    """Return the new contents of a path that other runs are writing, or were writing when they died."""
    name = re.compile(rf"\.{re.escape(path.name)}(\.[0-9a-f]{{32}})?\.partial")
    return [entry for entry in path.parent.iterdir() if name.fullmatch(entry.name)]


def check_exists(path: Path, *, is_folder: bool) -> None:
    """Raise `CheckpointError` if there is no checkpoint of this name, a folder or a ``.npy`` file."""
    if path.is_dir() if is_folder else path.exists():
        return
    if path.exists():
        raise CheckpointError(
            f"{path} is a file, and a checkpoint is a folder, or a file that ends in .npy"
        )
    previous = beside(path, "previous")
    hint = f"; the last one is {previous}: rename it" if previous.is_dir() else ""
    raise CheckpointError(f"there is no {'checkpoint' if is_folder else 'file'} {path}{hint}")


def replaced(path: object) -> CheckpointError:
    """Return the error of a load in which the ranks did not all read the same checkpoint completely."""
    return CheckpointError(
        f"{path} was replaced or removed while it was read; load it again, from a file system that all ranks share"
    )


class Replacement:
    """The new contents of a path, which replace the old contents in `commit`; local.

    Parameters
    ----------
    path : Path
        Absolute path; missing parent folders are made.
    may_replace : callable
        Returns whether an existing path is a checkpoint, which may be replaced.
    is_folder : bool
        Whether to make ``partial`` as an empty folder.
    keep : int
        Number of Zarr groups to keep, the new one included: the earlier ones take the names of `earlier`.

    Attributes
    ----------
    partial : Path
        Path for writing the new contents.

    Raises
    ------
    CheckpointError
        If another run is writing the same path, the existing path is not a checkpoint, a name of an earlier checkpoint
        has anything else, or the last checkpoint is still called "previous".
    OSError
        If the folder or the lock cannot be made.
    """

    def __init__(
        self, path: Path, may_replace: Callable[[Path], bool], is_folder: bool, keep: int = 1
    ) -> None:
        self._path, self.partial = path, beside(path, f"{uuid4().hex}.partial")
        self._kept = [earlier(path, n) for n in range(1, keep)]
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path) and not may_replace(path):
            raise CheckpointError(
                f"{path} exists and is not a checkpoint of this kind; give another path, or remove it"
            )
        self._check_kept()
        self._lock = Lock(path)
        try:
            previous = beside(path, "previous")
            if os.path.lexists(previous) and not os.path.lexists(path):
                raise CheckpointError(
                    f"{path} does not exist, and {previous} is the last checkpoint of a run that died when it replaced "
                    "that; rename it to go on from it, or remove it"
                )
            for partial in remains(path):
                remove(partial)
            if is_folder:
                self.partial.mkdir()
        except BaseException:
            self._lock.release()
            raise

    def commit(self) -> None:
        """Replace the old contents by the new contents, durably, and remove or keep the old contents."""
        _sync_tree(self.partial)
        self._check_kept()
        is_kept = bool(self._kept) and _mark(self._path)
        old = self.partial
        if not os.path.lexists(self._path) or self._path.is_file():
            os.replace(self.partial, self._path)
        elif not _swap_names(self.partial, self._path):
            self._rename_both()
            old = beside(self._path, "previous")
        if is_kept:
            self._shift(old)
        _sync(self._path.parent)
        with suppress(OSError):  # remains of the old contents do no harm
            remove(self.partial)
            remove(beside(self._path, "previous"))

    def discard(self) -> None:
        """Remove the new contents, unless `commit` has named them, and release the lock; may be repeated."""
        with suppress(OSError):
            remove(self.partial)
        self._lock.release()

    def _check_kept(self) -> None:
        """Raise `CheckpointError` if a name of an earlier checkpoint has anything else, such as one of the user's."""
        for name in self._kept:
            if (
                os.path.lexists(name)
                and _group(name).get("attributes", {}).get(_KEPT_OF) != self._path.name
            ):
                raise CheckpointError(
                    f"keep: {name} exists, and is not an earlier {self._path.name} that a save has kept; rename it, or "
                    "give another path"
                )

    def _shift(self, old: Path) -> None:
        """Name the old contents as the latest of the kept ones, and remove the oldest."""
        free = (n for n, name in enumerate(self._kept) if not os.path.lexists(name))
        last = next(free, len(self._kept) - 1)
        # The next run removes it, if this one dies.
        oldest = beside(self._path, f"{uuid4().hex}.partial")
        with suppress(FileNotFoundError):
            os.rename(self._kept[last], oldest)
        for n in range(last, 0, -1):
            os.rename(self._kept[n - 1], self._kept[n])
        os.rename(old, self._kept[0])
        remove(oldest)

    def _rename_both(self) -> None:
        previous = beside(self._path, "previous")
        remove(previous)
        os.rename(self._path, previous)
        try:
            os.rename(self.partial, self._path)
        except OSError:
            os.rename(previous, self._path)
            raise


class Lock:
    """Lock of a path, which one run holds; local. Raises `CheckpointError` if another run holds it, and OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: int | None = self._locked()
        _HELD.add(path)

    def _locked(self) -> int:
        name = beside(self._path, "lock")
        while True:
            handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                others = remains(self._path)
                if error.errno in _UNLOCKABLE and not others:
                    return handle  # the names must suffice
                os.close(handle)
                if error.errno in _UNLOCKABLE:
                    raise CheckpointError(
                        f"{others[0]} exists: another run is writing {self._path}, or one has died; this file "
                        "system has no locks to tell, so remove it if no run is writing"
                    ) from error
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                raise CheckpointError(
                    f"this program is writing {self._path}, as an open halox.Output does; close that, or its grid"
                    if self._path in _HELD
                    else f"another run is writing {self._path}, and holds {name}; give each run a path of its own, or "
                    "let the other one end"
                ) from error
            # The last owner may have removed the name after this process opened it.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(name)):
                    return handle
            os.close(handle)

    def release(self) -> None:
        """Release the lock; has no effect when repeated."""
        handle, self._handle = self._handle, None
        if handle is not None:
            _HELD.discard(self._path)
            with suppress(OSError):
                os.unlink(beside(self._path, "lock"))
            os.close(handle)


def remove(path: Path) -> None:
    """Remove a file, or a folder with its contents; a missing path is not an error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _group(path: Path) -> dict[str, Any]:
    """Return the metadata of a Zarr group; empty if there is no group."""
    try:
        metadata = json.loads((path / METADATA).read_bytes())
    except (OSError, ValueError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


def _mark(path: Path) -> bool:
    """Store the name of a Zarr group among its attributes, atomically; return whether there is a group."""
    metadata = _group(path)
    if metadata:
        metadata["attributes"][_KEPT_OF] = path.name
        new = path / f".{METADATA}.partial"
        with open(new, "w", encoding="utf-8") as file:
            json.dump(metadata, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path / METADATA)
    return bool(metadata)


def _swap_names(first: Path, second: Path) -> bool:
    """Exchange two names atomically; return whether the file system supports it."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    names = os.fsencode(first), os.fsencode(second)
    failed = rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)
    code = ctypes.get_errno()
    if failed and code not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        raise OSError(code, os.strerror(code), str(first), None, str(second))
    return not failed


def _sync_tree(path: Path) -> None:
    """Write folders through to the disk; their files are already on the disk."""
    if path.is_dir():
        for folder, _, _ in os.walk(path):
            _sync(Path(folder))


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
