"""The data paths, each one object behind one interface: `halox.paths.base`.

`PATHS` contains them by name. A plan starts and finishes their channels in this order. Paths with kernels that wait for
other ranks are first, so that the host work of the remaining paths overlaps with these waits.
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
    """Add a path at the end; it replaces a path of the same name."""
    PATHS[path.name] = path


register(PeerPath())
register(NcclPath())
register(IpcPath())
register(LocalPath())
register(StagedPath())
register(CudaAwarePath())
register(HostPath())
register(ScatterGatherPath())
