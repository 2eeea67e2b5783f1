"""The data paths, each one object behind one interface: `halox.paths.base`.

`PATHS` has them by name, in the order in which a plan starts and finishes their channels: first those whose kernels
wait for other ranks, so that what the others do on the host can go on meanwhile.
"""

from __future__ import annotations

from halox.paths.base import Path
from halox.paths.cuda_aware import CudaAwarePath
from halox.paths.host import HostPath
from halox.paths.ipc import IpcPath
from halox.paths.local import LocalPath
from halox.paths.nccl import NcclPath
from halox.paths.peer import PeerPath
from halox.paths.scatter_gather import ScatterGatherPath
from halox.paths.staged import StagedPath

PATHS: dict[str, Path] = {}


def register(path: Path) -> None:
    """Add a path, as the last; one of the same name is replaced."""
    PATHS[path.name] = path


register(PeerPath())
register(NcclPath())
register(IpcPath())
register(LocalPath())
register(StagedPath())
register(CudaAwarePath())
register(HostPath())
register(ScatterGatherPath())


def canonical(name: str) -> str:
    """Return a name "path" or "path/protocol" with today's name of the protocol, or unchanged if there is none."""
    path, _, protocol = name.partition("/")
    found = PATHS[path].protocol(protocol) if path in PATHS else None
    return f"{path}/{found.name}" if found else name
