"""The user's files of measured path constants, and the agreement of all ranks on them.

``halox tune`` writes a file for each `Fingerprint` of a set-up, below ``XDG_CACHE_HOME`` (``~/.cache`` by default). A
new driver or another MPI has no file, so that halox never uses stale constants.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from halox.errors import HaloxError
from halox.plans.costs import Costs
from halox.runtime.context import Context
from halox.runtime.topology import Topology
from halox.runtime.world import World
from halox.values import shortened

NO_GPU = "none"

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_GPU_FOLDER = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class Fingerprint:
    """Set-up of a measurement; its constants hold only for the same set-up."""

    gpu: str  # model of the ranks' GPUs, "none" for ranks on the host
    driver: str  # version of the NVIDIA driver and of the CUDA it supports
    topology: str  # GPUs of a node, whether ranks share GPUs and map one another's memory, one node or several
    mpi: str  # name and version, from the MPI library


def tuning_file(fingerprint: Fingerprint) -> Path:
    """Return the path of the file with the user's constants for a set-up."""
    name = f"tuning-{sha256(repr(fingerprint).encode()).hexdigest()[:16]}.json"
    folder = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # The XDG specification says to ignore a relative path.
        cache = Path(folder) if os.path.isabs(folder) else Path.home() / ".cache"
        return cache / "halox" / name
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


def load(fingerprint: Fingerprint) -> Costs | None:
    """Return the user's constants for a set-up, None if there are none; warns if the file cannot be used. Local."""
    path: Path | None = None
    try:
        path = tuning_file(fingerprint)
        costs = Costs.from_dict(json.loads(path.read_text(encoding="utf-8"))["costs"])
        # The file lacks protocols that could not be measured.
        return Costs.default().updated(costs.protocols, costs.origin)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (HaloxError, OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        if path is not None:
            warnings.warn(
                f"the tuning file {path} is ignored, and paths are chosen by shipped constants: "
                f"{shortened(' '.join(str(error).split()))}; run `halox tune` again, or delete the file",
                stacklevel=2,
            )
    return None


def save(fingerprint: Fingerprint, costs: Costs) -> Path:
    """Write the constants of a set-up, at once for readers, and return the path of their file. Local."""
    path = tuning_file(fingerprint)
    contents = {"fingerprint": asdict(fingerprint), "costs": costs.to_dict()}
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(contents, indent=1), encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        raise HaloxError(
            f"the constants cannot be written to {path} ({error}); set XDG_CACHE_HOME to a folder "
            "that can be written to"
        ) from error
    return path


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
