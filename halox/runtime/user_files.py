"""Small JSON files of the user, below ``XDG_CACHE_HOME``: validated on reading, replaced atomically."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 20
"""Size beyond which a file is none of halox's: an entry takes a few kilobytes."""


def cache_folder() -> Path:
    """Return ``halox`` in ``XDG_CACHE_HOME``, or in ``~/.cache`` by default.

    Raises RuntimeError if the user has no home directory and ``XDG_CACHE_HOME`` names none.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    # By the specification a relative path counts as none.
    return (Path(named) if os.path.isabs(named) else Path.home() / ".cache") / "halox"


def read_json(path: Path) -> Any:
    """Return the contents of a file; a pipe in its place is not read.

    Raises OSError if it is missing, irregular, too large or unreadable, and ValueError if it is no JSON or nested too
    deeply.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise OSError("it is no regular file")
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise OSError(f"it has more than {MOST_BYTES} bytes")
    try:
        return json.loads(text.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def write_json(path: Path, value: object) -> None:
    """Write a file, and the folders above it; readers see the old one or the new one, never half of one.

    Raises OSError if it cannot be written, ValueError if the value is no JSON; nothing is left behind then.
    """
    try:
        text = json.dumps(value, indent=1, allow_nan=False)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
