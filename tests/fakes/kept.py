"""Cache of the libraries that tests compile: by digest, kept between runs, each compiled by one process only."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable
from contextlib import suppress
from fcntl import LOCK_EX, flock
from functools import cache
from hashlib import sha256
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryFile, mkdtemp

FOLDER = "HALOX_TEST_LIBRARIES"

# Read at import, since tests change XDG_CACHE_HOME later.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "halox-tests"
_KEPT_DAYS = 14


@cache
def folder() -> Path:
    """Return the folder of the cache, which the ranks that this process starts use, too."""
    given = os.environ.get(FOLDER)
    if given:
        return Path(given)
    try:
        _CACHE.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=_CACHE).close()
        _drop_old(_CACHE)
        found = _CACHE
    except OSError:
        found, owner = Path(mkdtemp(prefix="halox-tests-")), os.getpid()
        atexit.register(lambda: os.getpid() == owner and rmtree(found, ignore_errors=True))
    os.environ[FOLDER] = str(found)
    return found


def _drop_old(place: Path) -> None:
    """Remove the files that no run has used for `_KEPT_DAYS` days."""
    for item in place.iterdir():
        with suppress(OSError):
            if item.stat().st_mtime < time.time() - _KEPT_DAYS * 86400:
                rmtree(item) if item.is_dir() else item.unlink()


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """Return the path of a file in the cache; ``make(path)`` writes it if it does not exist yet."""
    found, part = folder() / name, folder() / f"part-{name}"
    with (folder() / f"{name}.lock").open("w") as lock:
        flock(lock, LOCK_EX)
        if found.exists():
            os.utime(found)  # recently used: `_drop_old` keeps it
        else:
            make(part)
            part.rename(found)
    return found


def digest(*words: str) -> str:
    return sha256("\0".join(words).encode()).hexdigest()[:32]
