"""The data paths: each moves the messages of a plan between ranks in its own way, behind one interface.

`base` has the interface: a `Path` offers protocols for a message, the same at both ends, and makes the `Channel` of a
rank's messages in one plan, whose `start` and `finish` are an exchange. `messages` has what is moved, `launches` the
kernels that pack it on a GPU, `buffers` and `node` the memory and the flags between ranks.

`PATHS` contains all by name, and `HOST_PATHS` those with protocols for arrays on the host. A plan starts and finishes
their channels in this order: kernels that wait for other ranks first, so that the host work of the rest overlaps with
these waits. Begin with `base`, then `host/direct` or `local`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from halox.errors import PathError
from halox.paths.base import Path
from halox.paths.cuda_aware import CudaAwarePath
from halox.paths.host import HostPath
from halox.paths.ipc import IpcPath
from halox.paths.local import LocalPath
from halox.paths.nccl import NcclPath
from halox.paths.peer import PeerPath
from halox.paths.scatter_gather import ScatterGatherPath
from halox.paths.staged import StagedPath
from halox.values import shown

if TYPE_CHECKING:
    from halox.decomposition import FieldLayout

PATHS: dict[str, Path] = {}
HOST_PATHS: dict[str, Path] = {}


def register(path: Path) -> None:
    """Add a path at the end; it replaces a path of the same name."""
    PATHS[path.name] = path
    if path.moves("host"):
        HOST_PATHS[path.name] = path
    else:
        HOST_PATHS.pop(path.name, None)


for _path in (
    PeerPath(),
    NcclPath(),
    IpcPath(),
    LocalPath(),
    StagedPath(),
    CudaAwarePath(),
    HostPath(),
    ScatterGatherPath(),
):
    register(_path)


def reads_in_place(layout: FieldLayout, itemsize: int) -> bool:
    """Whether a field on the host should be in shared memory, so that neighbours can read it in place.

    Depends only on values that all ranks know, so that all ranks get the same answer.
    """
    return any(path.wants_shared_fields(layout, itemsize) for path in HOST_PATHS.values())


def requested_path(path: str | None) -> str | None:
    """Return the requested path: the argument, or else HALOX_PATH; None for the fastest path.

    Both ``path`` and HALOX_PATH are validated: raises `PathError` if a path or protocol does not exist, and
    `HaloxError` if the environment variable of a path has an invalid value, even if no rank has a GPU.
    """
    for name in PATHS:
        if f"HALOX_{name.upper()}" in os.environ:
            PATHS[name].check_settings()
    if path is not None and not isinstance(path, str):
        raise PathError(f"path: expected the name of a path, got {shown(path)}; {_known_paths()}")
    requested = []
    for source, text in (("path", path), ("HALOX_PATH", os.environ.get("HALOX_PATH"))):
        if not text:
            continue
        name, separator, protocol = text.partition("/")
        if name not in PATHS or PATHS[name].to_self:
            raise PathError(
                f"{source}: there is no path {shown(text)} between ranks; {_known_paths()}"
            )
        if separator and PATHS[name].protocol(protocol) is None:
            known = ", ".join(f"{name}/{each.name}" for each in PATHS[name].protocols)
            raise PathError(
                f"{source}: there is no protocol {shown(text)} of the path {name}; protocols are {known}"
            )
        requested.append(text)
    return requested[0] if requested else None


def _known_paths() -> str:
    return f"paths are {', '.join(name for name, one in PATHS.items() if not one.to_self)}"
