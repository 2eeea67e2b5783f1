"""The user's file of measured path constants, and the agreement of all ranks on them.

``halox tune`` writes the file, below ``XDG_CACHE_HOME`` (``~/.cache`` by default), with an entry for each `Fingerprint`
of a set-up. A new driver or another MPI makes another entry, so that halox never uses stale constants.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

from halox.errors import HaloxError
from halox.plans.costs import Costs
from halox.runtime.context import Context
from halox.runtime.topology import Topology
from halox.runtime.world import World

Entry: TypeAlias = dict[str, Any]
"""Constants of one set-up in the file, with its fingerprint."""

FORMAT = 1
"""Format of the file; files of another format are ignored."""

NO_GPU = "none"

_MOST_REASON_LENGTH = 1000
_REMEDY = "run `halox tune` again"
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_GPU_FOLDER = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class Fingerprint:
    """Set-up of a measurement; its constants hold only for the same set-up."""

    gpu: str  # model of the ranks' GPUs, "none" for ranks on the host
    driver: str  # version of the NVIDIA driver and of the CUDA it supports
    topology: str  # GPUs of a node, whether ranks share GPUs and map one another's memory, one node or several
    mpi: str  # name and version, from the MPI library


def tuning_file() -> Path:
    """Return the path of the file with the user's constants."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # The XDG specification says to ignore a relative path.
        cache = Path(folder) if os.path.isabs(folder) else Path.home() / ".cache"
        return cache / "halox" / "tuning.json"
    except RuntimeError as error:  # there is no home directory
        raise HaloxError(
            f"there is no place for a tuning file ({error}); set XDG_CACHE_HOME to a folder"
        ) from error


def fingerprint_of(world: World, topology: Topology, device: int | None) -> Fingerprint:
    """Return the fingerprint of the ranks' set-up, the same on all of them; collective over the world."""
    mine = (*_gpu(device), " ".join(world.mpi.Get_library_version().rstrip("\0").split()))
    gathered = world.gather(lambda: (None, mine), "the choice of path constants")[1].distinct

    def all_of(column: int) -> str:
        return "; ".join(sorted({str(row[column]) for row in gathered}))

    counts = [row[2] for row in gathered]
    return Fingerprint(
        all_of(0),
        all_of(1),
        f"{max(counts)} GPU(s) a node, {describe_topology(topology)}",
        all_of(3),
    )


def describe_topology(topology: Topology) -> str:
    """Return in words how ranks and GPUs are related, independent of the number of ranks."""
    mapped, apart = topology.pairs
    memory = {(False, False): "no pairs", (True, False): "all", (False, True): "none"}
    use = "shared by ranks" if topology.is_shared else "one rank each"
    span = "several nodes" if topology.nodes.any() else "one node"
    return f"{use}, memory mapped: {memory.get((mapped > 0, apart > 0), 'some')}, {span}"


def costs_of(context: Context) -> Costs:
    """Return the constants by which all ranks choose paths; collective, for `Context.once`."""
    fingerprint = fingerprint_of(context.world, context.find_gpus(), context.device)
    return agreed_costs(context.world, fingerprint)


def agreed_costs(world: World, fingerprint: Fingerprint) -> Costs:
    """Return the constants by which all ranks choose: the user's for this set-up, or the shipped ones; collective.

    Only rank 0 reads the file, since files may differ between nodes and ranks must agree. One rank, or ranks without a
    GPU, have no choice of paths, and no rank reads the file.
    """
    if world.size == 1 or fingerprint.gpu == NO_GPU:
        return Costs.default()
    costs = world.from_first(lambda: load(fingerprint), "the reading of the tuning file")
    return costs or Costs.default()


def load(fingerprint: Fingerprint, path: Path | None = None) -> Costs | None:
    """Return the user's constants for a set-up, None if there are no such constants.

    Local; never raises. Warns if the file exists but cannot be used: it is corrupt, has another format, or has entries
    of other set-ups only.
    """
    try:
        path = path or tuning_file()
        return _find(fingerprint, json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        _warn(path, f"it cannot be read ({error})")
    except (ValueError, RecursionError) as error:
        _warn(path, f"it is corrupt: {error}")
    except HaloxError as error:
        if path is not None:
            _warn(path, str(error))
    return None


def _find(fingerprint: Fingerprint, contents: object) -> Costs | None:
    """Return the constants of a set-up from a file's contents, None if the file has no entries.

    Raises `HaloxError` if there are only entries of other set-ups.
    """
    entries = _entries(contents)
    for entry in entries:
        if entry.get("fingerprint") == asdict(fingerprint):
            try:
                costs = Costs.from_dict(entry.get("costs"))
            except HaloxError as error:
                raise HaloxError(f"it is corrupt: {error}") from error
            # The file lacks protocols that could not be measured.
            return Costs.default().updated(costs.protocols, costs.origin)
    if entries:
        raise HaloxError(_other_machine(fingerprint, entries))
    return None


def save(fingerprint: Fingerprint, costs: Costs, path: Path | None = None) -> Path:
    """Write the constants of a set-up, in place of earlier constants of the same set-up.

    Local. Entries of other set-ups are kept, unless the file is corrupt or has another format. Readers see the old file
    or the new file, never half of a file.
    """
    path = path or tuning_file()
    try:
        entries = _entries(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, HaloxError):
        entries = []
    others = [entry for entry in entries if entry.get("fingerprint") != asdict(fingerprint)]
    entry = {"fingerprint": asdict(fingerprint), "costs": costs.to_dict()}
    try:
        _replace(path, json.dumps({"format": FORMAT, "entries": [*others, entry]}, indent=1))
    except OSError as error:
        raise HaloxError(
            f"the constants cannot be written to {path} ({error}); set XDG_CACHE_HOME to a folder "
            "that can be written to"
        ) from error
    return path


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _entries(contents: object) -> list[Entry]:
    if not isinstance(contents, dict) or "format" not in contents:
        raise HaloxError("it is corrupt: no format is named in it")
    if contents["format"] != FORMAT:
        raise HaloxError(f"it is of format {contents['format']!r}, and this halox reads {FORMAT}")
    entries = contents.get("entries")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise HaloxError("it is corrupt: it holds no list of entries")
    return entries


def _other_machine(wanted: Fingerprint, entries: list[Entry]) -> str:
    """Return the error text that names the differences to the most similar set-up in the file."""

    def differences(entry: Entry) -> list[str]:
        there = entry.get("fingerprint")
        known = there if isinstance(there, dict) else {}
        return [
            f"{part.name} {known.get(part.name)!r} instead of {getattr(wanted, part.name)!r}"
            for part in fields(Fingerprint)
            if known.get(part.name) != getattr(wanted, part.name)
        ]

    nearest = min(map(differences, entries), key=len)
    return f"it was measured on another machine or set-up ({'; '.join(nearest)})"


def _warn(path: Path | None, why: str) -> None:
    reason = " ".join(why.split())  # on one line, for any contents of the file
    reason = reason if len(reason) <= _MOST_REASON_LENGTH else f"{reason[:_MOST_REASON_LENGTH]} ..."
    warnings.warn(
        f"the tuning file {path} is ignored, and paths are chosen by shipped constants: {reason}; "
        f"{_REMEDY}, or delete the file",
        stacklevel=3,
    )


def _gpu(device: int | None) -> tuple[str, str, int]:
    """Return the model of the GPU, its driver, and the node's number of GPUs."""
    if device is None:
        return NO_GPU, "none", 0
    from halox.runtime.gpu.cuda import cupy, gpu_count

    runtime = cupy().cuda.runtime
    model = runtime.getDeviceProperties(device)["name"].decode()
    driver = f"CUDA {runtime.driverGetVersion()}"
    with suppress(OSError):
        version = re.search(r"\b\d{3,}\.\d[\d.]*", _DRIVER_FILE.read_text(encoding="utf-8"))
        driver = f"{version[0]}, {driver}" if version else driver
    count = gpu_count()
    with suppress(OSError):
        # Count the GPUs that CUDA_VISIBLE_DEVICES hides from a rank, too.
        count = max(count, len(list(_GPU_FOLDER.iterdir())))
    return model, driver, count
