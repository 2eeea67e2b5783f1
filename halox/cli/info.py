"""``halox info``: versions, MPI, GPUs and data paths on this machine."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess

from halox._version import __version__
from halox.cli import launcher, report
from halox.errors import HaloxError
from halox.paths import PATHS
from halox.runtime.gpu import cuda
from halox.runtime.world import load_mpi

_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*m")
_PACKAGES = ("numpy", "mpi4py", "cupy", "xarray", "matplotlib")


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
    answer: dict[str, object] = {}
    try:
        start = launcher.find()
        answer["launcher"] = f"{start.path} ({start.family} {start.version})".replace(" )", ")")
    except HaloxError as error:
        answer["launcher"] = f"none: {error}"
    os.environ.update(launcher.mpi_defaults())
    try:
        library = load_mpi().Get_library_version()
        answer["library"] = " ".join(library.rstrip("\0").split())
    except HaloxError as error:
        answer["library"] = f"none: {error}"
    return answer


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


def topology() -> str:
    """Return the driver's matrix of the links between GPUs, as text."""
    if shutil.which("nvidia-smi") is None:
        return "nvidia-smi not found"
    process = subprocess.run(
        ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60, check=False
    )
    if process.returncode != 0:
        return process.stderr.strip()
    matrix = process.stdout.partition("Legend")[0]
    return "\n" + _TERMINAL_CODES.sub("", matrix).strip("\n").expandtabs(16)


def summaries_of_paths(why_no_gpu: str | None) -> dict[str, str]:
    """Return the summary of each registered data path, or the reason why it is not possible."""
    impossible = "not possible: no usable GPU"
    return {
        name: path.summary if path.moves("host") or why_no_gpu is None else impossible
        for name, path in PATHS.items()
    }
