"""Libraries that tests compile: kept by digest between runs, and made once by processes that run at the same time."""

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

# Asked for now, since tests point XDG_CACHE_HOME elsewhere.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "halox-tests"
_KEPT_DAYS = 14


@cache
def folder() -> Path:
    """Return the folder of libraries kept between runs; the ranks that this process starts use it too."""
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
    """Remove what no run has used for a while."""
    for item in place.iterdir():
        with suppress(OSError):
            if item.stat().st_mtime < time.time() - _KEPT_DAYS * 86400:
                rmtree(item) if item.is_dir() else item.unlink()


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """Return the path of a file by its name; ``make`` writes it, at the path it is given, if there is none yet."""
    found, part = folder() / name, folder() / f"part-{name}"
    with (folder() / f"{name}.lock").open("w") as lock:
        flock(lock, LOCK_EX)
        if found.exists():
            os.utime(found)  # in use
        else:
            make(part)
            part.rename(found)
    return found


def digest(*words: str) -> str:
    return sha256("\0".join(words).encode()).hexdigest()[:32]
