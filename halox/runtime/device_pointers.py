"""Test whether MPI accepts device pointers, for the cuda_aware path.

The test runs in a child process, since a library that claims support may crash. One rank per node runs
`halox.runtime.device_pointers_probe`, once per software set-up. The result is stored in
``XDG_CACHE_HOME/halox/device_pointers.json``. With ``HALOX_CUDA_AWARE=1`` halox trusts the library without a test; with
``HALOX_CUDA_AWARE=0`` halox never passes a device pointer to MPI.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from halox.errors import HaloxError
from halox.runtime.device_pointers_probe import YES
from halox.runtime.gpu import cuda
from halox.runtime.user_files import cache_folder, read_json, write_json
from halox.runtime.world import World, load_mpi

VARIABLE = "HALOX_CUDA_AWARE"
LIMIT_S = 20.0
"""Time limit of a test in seconds: several times the start of Python, CuPy, MPI and a CUDA context."""

_MOST_SAID = 300

_LAUNCHERS = re.compile(
    r"(OMPI|PMIX|PMI|PMI2|PRTE|ORTE|SLURM|HYDRA|HYDI|PALS|FLUX|LSB|JSM|MPIEXEC|MPIRUN|I_MPI_HYDRA)_"
    r"|(PMI_|PMIX|MPI_LOCAL|MV2_COMM_WORLD|OPAL_)"
)
"""Environment variables by which a launcher tells a process that it is an MPI rank."""

_CHOICES = re.compile(
    r"OMPI_MCA_(pml|btl|mtl|osc|coll|accelerator|opal_cuda|mpi_)|OPAL_(PREFIX|LIBDIR)$"
)
"""Launcher variables that select MPI components or the MPI installation; the child process keeps them."""

_ENVIRONMENT = re.compile(
    r"UCX_|OMPI_MCA_(pml|btl|mtl|osc|coll|accelerator|opal_cuda|mpi_)|MPICH_|MV2_|I_MPI_OFFLOAD|FI_|PSM2_|CUDA_VISIBLE_DEVICES$"
)
"""Environment variables that may change the result."""

_SEARCHING = "the search for device pointers in MPI"


@dataclass(frozen=True)
class Verdict:
    """Whether MPI accepts device pointers, the reason, and whether the verdict is valid for later jobs."""

    takes: bool
    reason: str
    lasting: bool = True


def find_out(world: World, device: int | None) -> Verdict:
    """Return whether MPI accepts device pointers on all nodes; the same result, or error, on all ranks.

    Collective. The first call on a machine starts a process and may take `LIMIT_S` seconds. Call it once per world.
    """
    ranks = world.ranks
    on_gpu: list[bool] = ranks.gather(device is not None, _SEARCHING, of_node=True)

    def verdict_here() -> Verdict | None:
        decided = decided_by_user()
        if decided is not None or device is None or on_gpu.index(True) != world.node_rank:
            return decided
        # The other ranks wait for the result, at most for ``world.limit_s``.
        limit_s = min(LIMIT_S, world.limit_s / 2 or LIMIT_S)
        return asked_before(device, ask=lambda gpu: ask_child(gpu, limit_s=limit_s))

    mine = world.attempt(verdict_here, _SEARCHING)
    # A test is valid for its node, the environment variable for its rank.
    of_node = [verdict for verdict in ranks.gather(mine, _SEARCHING, of_node=True) if verdict]
    first = min(of_node, key=lambda verdict: verdict.takes, default=None)
    of_all = world.gather(lambda: (None, first), _SEARCHING)[1]
    for rank, verdict in enumerate(of_all):
        if verdict is not None and not verdict.takes:
            where = "" if world.node_count == 1 else f" (rank {rank})"
            return Verdict(False, verdict.reason + where)
    return next(filter(None, of_all), Verdict(False, "no rank has a GPU"))


def decided_by_user() -> Verdict | None:
    """Return the verdict of ``HALOX_CUDA_AWARE``, None if it is not set."""
    text = os.environ.get(VARIABLE, "")
    if text not in ("", "0", "1"):
        raise HaloxError(
            f"{VARIABLE}={text!r}: expected 1 (MPI takes device pointers), 0 (it must not be given any) or nothing "
            "(find out)"
        )
    return Verdict(text == "1", f"{VARIABLE} is {text}") if text else None


def asked_before(device: int, *, ask: Callable[[int], Verdict], key: str | None = None) -> Verdict:
    """Return the stored verdict of an earlier job with this set-up, or run ``ask`` and store its verdict; local."""
    denied = library_denies()
    if denied is not None:
        return Verdict(False, denied)
    key = set_up() if key is None else key
    entry = _stored().get(key)
    known = entry if isinstance(entry, dict) else {}
    takes, reason = known.get("takes"), known.get("reason")
    if isinstance(takes, bool) and isinstance(reason, str):
        return Verdict(takes, f"{reason[:_MOST_SAID]} (found by an earlier job)")
    verdict = ask(device)
    if verdict.lasting:
        with suppress(OSError, ValueError, RuntimeError):
            # Read the file again: another process may have changed it.
            write_json(
                cache_file(), _stored() | {key: {"takes": verdict.takes, "reason": verdict.reason}}
            )
    return verdict


def library_denies() -> str | None:
    """Return a reason if the MPI library reports no CUDA support, else None; reported support may not work."""
    if _query_library() == 0:
        return "the MPI library says that it has no support for CUDA (MPIX_Query_cuda_support)"
    return None


def _query_library() -> int | None:
    try:
        function = ctypes.CDLL(load_mpi().__file__).MPIX_Query_cuda_support
    except (OSError, AttributeError):
        return None
    function.restype, function.argtypes = ctypes.c_int, ()
    return int(function())


def set_up(environ: Mapping[str, str] = os.environ) -> str:
    """Return a digest of the set-up: MPI library, mpi4py, CuPy, CUDA driver and MPI settings."""
    mpi = load_mpi()
    parts = [
        mpi.Get_library_version(),
        mpi.__file__,
        cuda.cupy().__version__,
        str(cuda.cupy().cuda.runtime.driverGetVersion()),
        *sorted(f"{k}={v}" for k, v in environ.items() if _ENVIRONMENT.match(k)),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def cache_file() -> Path:
    """Return the path of the file of verdicts; RuntimeError if there is no cache folder."""
    return cache_folder() / "device_pointers.json"


def _stored() -> dict[str, object]:
    with suppress(OSError, ValueError, RuntimeError):
        entries = read_json(cache_file())
        if isinstance(entries, dict):
            return entries
    return {}


def ask_child(
    device: int, command: Sequence[str] | None = None, limit_s: float = LIMIT_S
) -> Verdict:
    """Run the probe, and return its verdict; blocks."""
    if command is None:
        command = [sys.executable, "-m", "halox.runtime.device_pointers_probe", str(device)]
    try:
        child = subprocess.Popen(
            command,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        reason = f"the trial with a device pointer could not be started ({error})"
        return Verdict(False, reason, lasting=False)
    try:
        output, _ = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        reason = f"a trial with a device pointer did not end within {limit_s:g} s"
        return Verdict(False, reason, lasting=limit_s >= LIMIT_S)
    finally:
        # Kill the child's whole process group.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
    if child.returncode == 0 and YES in output.splitlines():
        return Verdict(True, "a trial with device pointers succeeded")
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        return Verdict(False, f"a trial with a device pointer ended by {name}")
    last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")
    return Verdict(
        False, f"a trial with a device pointer failed with status {child.returncode}: {last[:200]}"
    )


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for a child that initializes MPI as a singleton, not as this rank."""
    variables = {k: v for k, v in environ.items() if not _LAUNCHERS.match(k) or _CHOICES.match(k)}
    # The child must import the same halox as this process.
    root = str(Path(__file__).resolve().parents[2])
    variables["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [environ.get("PYTHONPATH")])])
    return variables
