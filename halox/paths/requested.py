"""Answers of all paths together: whether a requested path exists, and whether fields belong in shared memory."""

from __future__ import annotations

import os

from halox.decomposition import FieldLayout
from halox.errors import PathError
from halox.paths import PATHS
from halox.values import shown


def reads_in_place(layout: FieldLayout, itemsize: int) -> bool:
    """Whether a field should be in shared memory, so that neighbours can read it in place.

    Depends only on values that all ranks know, so that all ranks get the same answer.
    """
    return any(path.wants_shared_fields(layout, itemsize) for path in PATHS.values())


def requested_path(path: str | None) -> str | None:
    """Return the requested path: the argument, or else HALOX_PATH; None for the fastest path.

    Both ``path`` and HALOX_PATH are validated: raises `PathError` if a path or protocol does not exist, and
    `HaloxError` if an environment variable of a path has an invalid value, even if no rank has a GPU.
    """
    paths = {name: one for name, one in PATHS.items() if not one.to_self}
    for one in paths.values():
        one.check_settings()
    if path is not None and not isinstance(path, str):
        raise PathError(
            f"path: expected the name of a path, got {shown(path)}; paths are {', '.join(paths)}"
        )
    requested = []
    for source, text in (("path", path), ("HALOX_PATH", os.environ.get("HALOX_PATH"))):
        if not text:
            continue
        name, separator, protocol = text.partition("/")
        if name not in paths:
            raise PathError(
                f"{source}: there is no path {shown(text)} between ranks; paths are {', '.join(paths)}"
            )
        if separator and paths[name].protocol(protocol) is None:
            known = ", ".join(f"{name}/{one.name}" for one in paths[name].protocols)
            raise PathError(
                f"{source}: there is no protocol {shown(text)} of the path {name}; protocols are {known}"
            )
        requested.append(text)
    return requested[0] if requested else None
