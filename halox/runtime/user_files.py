"""Small JSON files in the user's ``XDG_CACHE_HOME``: checked when read, replaced atomically.

halox stores the constants of ``halox tune`` there.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 20
"""Largest accepted file in bytes; a file of halox has a few kilobytes per entry."""


def cache_folder() -> Path:
    """Return ``halox`` in ``XDG_CACHE_HOME``, or in ``~/.cache`` by default.

    Raises RuntimeError if ``XDG_CACHE_HOME`` is not an absolute path and the user has no home directory.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    return (Path(named) if os.path.isabs(named) else Path.home() / ".cache") / "halox"


def read_json(path: Path) -> Any:
    """Return the contents of a regular file; pipes and devices are not read.

    Raises OSError if the file is missing, irregular, too large or unreadable, and ValueError if the text is not JSON or
    nested too deeply.
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
    """Write a file and create its folders; readers see the old file or the new one, never a partial file.

    Raises OSError if the file cannot be written, and ValueError if JSON cannot represent the value. No temporary file
    remains after an error.
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
