"""Run commands that start ranks. A command that makes no progress is ended, and each of its ranks prints its stack."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

QUIET_S = 900.0
"""Seconds without output after which a command counts as stuck. A slow test prints its stack before that time."""

_STACK_S = 300
_DUMPING_S = 20.0
_LIBC = ctypes.CDLL(None)

PYTEST = [
    *("-m", "pytest", "-q", "-p", "halox.testing", "-p", "no:cacheprovider", "--color=no"),
    # A slow test prints the stacks of its ranks and continues, since the machine may be busy.
    *("-o", f"faulthandler_timeout={_STACK_S}", "-o", "faulthandler_exit_on_timeout=false"),
]
"""Arguments of Python for running tests on ranks."""

SETTINGS = {
    "PYTHONPATH": str(ROOT),
    # Options of the outer pytest run must not reach the ranks.
    "PYTEST_ADDOPTS": "",
    # No plugin is needed, and every rank would import all of them.
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}
"""Environment variables for running tests on ranks."""


SHARED_CORES = {
    "OMPI_MCA_hwloc_base_binding_policy": "none",  # Open MPI 4
    "PRTE_MCA_hwloc_default_binding_policy": "none",  # Open MPI 5
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
"""Environment of ranks beside other launches: they may run on any core, and yield it while they wait in MPI.

By default Open MPI binds the two ranks of a launch to the first two cores. Launches at the same time would share these
two cores, on a machine with any number of cores, and a rank that waits keeps its core busy.
"""


@dataclass(frozen=True)
class Ended:
    """Exit status of a command, None if it was stuck, and its output."""

    status: int | None
    said: str


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    quiet_s: float = QUIET_S,
    has_begun: Callable[[], bool] = lambda: True,
) -> Ended:
    """Run a command in the root of the checkout until it exits, or until it prints nothing for ``quiet_s`` seconds.

    The seconds count from the time when ``has_begun()`` is true.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        try:
            status = _wait(process, output.fileno(), quiet_s, has_begun)
        finally:
            _end(process)
        output.seek(0)
        return Ended(status, output.read().decode(errors="replace"))


def _end_with_parent() -> None:
    """Have the kernel end this process when its parent, which runs the tests, dies."""
    _LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _wait(
    process: subprocess.Popen[bytes], output: int, quiet_s: float, has_begun: Callable[[], bool]
) -> int | None:
    size, since = -1, time.monotonic()
    while time.monotonic() - since < quiet_s:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(0.2)
        if os.fstat(output).st_size != size or not has_begun():
            size, since = os.fstat(output).st_size, time.monotonic()
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher and its ranks; every rank first prints the stacks of its threads, on SIGABRT."""
    if process.poll() is not None:
        return
    started = descendants(process.pid)
    ranks = [pid for pid in started if _is_running_python(pid)]
    # A launcher kills all ranks when one dies, and it forwards their output. Stopped, it lets every rank print its
    # stacks; resumed, it forwards them.
    launchers = [process.pid, *(pid for pid in started if pid not in ranks)]
    _signal(launchers, signal.SIGSTOP)
    _signal(ranks, signal.SIGABRT)
    end = time.monotonic() + _DUMPING_S
    while any(map(_is_running_python, ranks)) and time.monotonic() < end:
        time.sleep(0.05)
    _signal(launchers, signal.SIGCONT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_DUMPING_S)
    _signal([*started, process.pid], signal.SIGKILL)
    process.wait()


def _is_running_python(pid: int) -> bool:
    """Whether a process is a Python interpreter and not a zombie."""
    with suppress(OSError):
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        return "python" in name and rest.split()[0] != "Z"
    return False


def _signal(processes: Sequence[int], number: signal.Signals) -> None:
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def descendants(pid: int) -> list[int]:
    """Return the child processes of a process and their descendants."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [one for child in map(int, children) for one in (child, *descendants(child))]
