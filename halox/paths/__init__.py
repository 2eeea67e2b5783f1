"""The data paths, each one object behind one interface: `halox.paths.base`.

`PATHS` contains them by name. A plan starts and finishes their channels in this order. Paths with kernels that wait for
other ranks are first, so that the host work of the remaining paths overlaps with these waits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from halox.errors import PathError
from halox.paths.base import Path
from halox.values import shown

if TYPE_CHECKING:
    from halox.decomposition import FieldLayout


class Shipped(NamedTuple):
    """A path of halox that has not been imported yet."""

    module: str
    kind: str  # name of its class
    on_host: bool  # whether any of its protocols is for arrays on the host


class Registry(MutableMapping[str, Path]):
    """Paths by name; the module of a path is imported when the path is first used."""

    def __init__(self, paths: Mapping[str, Path | Shipped]) -> None:
        self._paths = dict(paths)
        self._on_host: dict[str, Path] = {}

    def __getitem__(self, name: str) -> Path:
        """Return a path."""
        path = self._paths[name]
        if isinstance(path, Shipped):
            new: Path = getattr(import_module(path.module), path.kind)()
            path = self._paths[name] = new
        return path

    def __setitem__(self, name: str, path: Path) -> None:
        """Add a path at the end, or replace a path."""
        self._on_host = {}
        self._paths[name] = path

    def __delitem__(self, name: str) -> None:
        """Remove a path."""
        self._on_host = {}
        del self._paths[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._paths)

    def __len__(self) -> int:
        """Return the number of paths."""
        return len(self._paths)

    def on_host(self) -> Mapping[str, Path]:
        """Return the paths with protocols for arrays on the host; imports no other path."""
        if not self._on_host:
            names = [
                name
                for name, one in self._paths.items()
                if (one.on_host if isinstance(one, Shipped) else one.moves("host"))
            ]
            self._on_host = {name: self[name] for name in names}
        return self._on_host


PATHS = Registry(
    {
        "peer": Shipped("halox.paths.peer", "PeerPath", on_host=False),
        "nccl": Shipped("halox.paths.nccl", "NcclPath", on_host=False),
        "ipc": Shipped("halox.paths.ipc", "IpcPath", on_host=False),
        "local": Shipped("halox.paths.local", "LocalPath", on_host=True),
        "staged": Shipped("halox.paths.staged", "StagedPath", on_host=False),
        "cuda_aware": Shipped("halox.paths.cuda_aware", "CudaAwarePath", on_host=False),
        "host": Shipped("halox.paths.host", "HostPath", on_host=True),
        "scatter_gather": Shipped("halox.paths.scatter_gather", "ScatterGatherPath", on_host=True),
    }
)


def register(path: Path) -> None:
    """Add a path at the end; it replaces a path of the same name."""
    PATHS[path.name] = path


def reads_in_place(layout: FieldLayout, itemsize: int) -> bool:
    """Whether a field on the host should be in shared memory, so that neighbours can read it in place.

    Depends only on values that all ranks know, so that all ranks get the same answer.
    """
    return any(path.wants_shared_fields(layout, itemsize) for path in PATHS.on_host().values())


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
