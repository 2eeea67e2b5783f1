"""``halox info``: versions, MPI, GPUs and data paths on this machine."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from halox._version import __version__
from halox.cli import launcher, report
from halox.errors import HaloxError
from halox.paths import PATHS
from halox.runtime.gpu import cuda
from halox.runtime.shared_memory import space_left
from halox.runtime.world import load_mpi

_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*m")
_PACKAGES = ("numpy", "mpi4py", "cupy", "xarray", "matplotlib")
_TCP_GB_S = 2.5  # 20 Gb/s, about the rate of one core and one connection
_NVLINK_GB_S = {(6, 0): 20, (8, 6): 14, (10, 0): 50}  # of a link, by compute capability; else 25


class Machine(NamedTuple):
    """Facts of one rank that bound its links. Rates are in GB/s of one direction; unknown facts are 0 or empty.

    ``network`` is rate and name of the fastest active port of InfiniBand or RoCE, else of the fastest interface.
    ``rdma`` tells whether the process has loaded the library of such ports; it is None without a port. ``gpu`` is the
    PCI address of the rank's GPU. ``is_far`` is true if none of ``cores`` is on the NUMA node of the GPU.
    """

    host: str
    cores: frozenset[int]
    shared_bytes: int
    network: tuple[float, str] = (0, "")
    rdma: bool | None = None
    gpu: str = ""
    is_far: bool = False
    pcie: float = 0
    nvlink: Mapping[tuple[str, str], int] = {}


def show(*, as_json: bool) -> None:
    """Print `collect` as text or as JSON."""
    facts = collect()
    print(report.as_json(facts) if as_json else report.as_text(facts))


def collect() -> dict[str, object]:
    """Return versions, MPI, GPUs and their links, and data paths; makes a GPU context if a GPU exists."""
    why_no_gpu, gpus = _gpus()
    return {
        "halox": __version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "packages": {name: _version(name) or "not installed" for name in _PACKAGES},
        "mpi": _mpi(),
        "gpu": {"works": why_no_gpu is None, "why_not": why_no_gpu, "count": len(gpus)},
        **({"gpus": gpus, "gpu_links": _links(len(gpus))} if gpus else {}),
        "paths": summaries_of_paths(why_no_gpu),
    }


def _version(name: str) -> str | None:
    try:
        return str(importlib.import_module(name).__version__)
    except Exception:
        # The import of an installed package can fail in many ways; treat the package as missing.
        return None


def _mpi() -> dict[str, object]:
    os.environ.update(launcher.mpi_defaults())
    try:
        library = " ".join(load_mpi().Get_library_version().rstrip("\0").split())
    except HaloxError as error:
        # The first line has the remedy, which brings a launcher, too; the others list the files that were tried.
        return {"launcher": "none", "library": f"none: {str(error).splitlines()[0]}"}
    try:
        start = launcher.find()
    except HaloxError as error:
        return {"launcher": f"none: {error}", "library": library}
    path = f"{start.path} ({start.family} {start.version})".replace(" )", ")")
    return {"launcher": path, "library": library}


def _gpus() -> tuple[str | None, list[dict[str, object]]]:
    """Return why no GPU can be used (None if one can) and the GPUs."""
    reason = cuda.why_no_gpu()
    gpus = []
    for device in range(cuda.gpu_count()):
        properties = cuda.cupy().cuda.runtime.getDeviceProperties(device)
        gpus.append(
            {
                "device": device,
                "name": properties["name"].decode(),
                "memory_gib": round(properties["totalGlobalMem"] / 2**30, 1),
                "capability": f"{properties['major']}.{properties['minor']}",
            }
        )
    return reason, gpus


def _links(count: int) -> dict[str, object]:
    """Return the GPUs that can access each other's memory, and the driver's table of the links."""
    reach = cuda.cupy().cuda.runtime.deviceCanAccessPeer
    matrix = {
        f"gpu {i} reaches": [j for j in range(count) if i != j and reach(i, j)]
        for i in range(count)
    }
    return matrix | {"topology": topology()}


def nvidia_smi(*words: str) -> str:
    """Return the output of ``nvidia-smi``, or its error."""
    if shutil.which("nvidia-smi") is None:
        return "nvidia-smi not found"
    process = subprocess.run(
        ["nvidia-smi", *words], capture_output=True, text=True, timeout=60, check=False
    )
    return process.stderr.strip() if process.returncode else process.stdout


def topology() -> str:
    """Return the driver's matrix of the links between GPUs, as text."""
    matrix = nvidia_smi("topo", "-m").partition("Legend")[0]
    return "\n" + _TERMINAL_CODES.sub("", matrix).strip("\n").expandtabs(16)


def nvlinks(device: int) -> dict[tuple[str, str], int]:
    """Return GB/s of one direction between GPUs with NVLink, by their PCI addresses; NV18 means 18 links."""
    about = cuda.cupy().cuda.runtime.getDeviceProperties(device)
    each = _NVLINK_GB_S.get((about["major"], about["minor"]), 25)
    gpus = nvidia_smi("--query-gpu=pci.bus_id", "--format=csv,noheader").lower().split()
    rows = [line.split()[1:] for line in topology().splitlines() if " X " in f"{line} "]
    return {
        (a[-12:], b[-12:]): int(cell[2:]) * each
        for a, row in zip(gpus, rows, strict=False)
        for b, cell in zip(gpus, row, strict=False)
        if re.fullmatch(r"NV\d+", cell)
    }


def machine(device: int | None, root: Path, *, asks_nvlinks: bool) -> Machine:
    """Return the facts of this rank, with arrays on a GPU or (None) on the host; ``root`` is /sys."""
    cores, gpu = os.sched_getaffinity(0), ""
    if device is not None:
        gpu = cuda.cupy().cuda.runtime.deviceGetPCIBusId(device).lower()
    place = root / "bus/pci/devices" / (gpu or "none")
    near = f"devices/system/node/node{_number(place / 'numa_node', -1):.0f}"
    rdma = [
        (_number(port / "rate") / 8, f"{port.parents[1].name} port {port.name}")
        for port in root.glob("class/infiniband/*/ports/*")
        if _number(port / "state") == 4  # active
    ]
    # Virtual interfaces have no device. Speeds are in Mb/s, -1 if an interface is down.
    interfaces = [path.parent for path in root.glob("class/net/*/device")]
    tcp = [(min(_number(i / "speed") / 8e3, _TCP_GB_S), f"TCP by {i.name}") for i in interfaces]
    loaded = Path("/proc/self/maps").read_text(errors="replace")
    return Machine(
        host=os.uname().nodename,
        cores=frozenset(cores),
        shared_bytes=space_left(),
        network=max(rdma or [(0.0, ""), *tcp]),
        rdma="libibverbs" in loaded if rdma else None,
        gpu=gpu,
        is_far=(root / near).exists()
        and not any((root / near / f"cpu{c}").exists() for c in cores),
        # 130 bits carry 128 bits of data, from PCIe 3 on.
        pcie=_number(place / "max_link_speed") * _number(place / "max_link_width") / 8 * 128 / 130,
        nvlink=nvlinks(device) if device is not None and asks_nvlinks else {},
    )


def _number(path: Path, otherwise: float = 0) -> float:
    """Return the number at the start of a file."""
    try:
        return float(re.split(r"[^-.\d]", path.read_text())[0])
    except (OSError, ValueError):
        return otherwise


def summaries_of_paths(why_no_gpu: str | None) -> dict[str, str]:
    """Return the summary of each registered data path, or the reason why it is not possible."""
    impossible = "not possible: no usable GPU"
    return {
        name: path.summary if path.moves("host") or why_no_gpu is None else impossible
        for name, path in PATHS.items()
    }
