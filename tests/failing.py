"""Jobs with ranks that die or stop, without the launcher killing the surviving ranks.

A launcher kills all ranks when one dies. Here it starts guards, which never fail. Each guard starts its rank in a new
process session, and resumes it after it has stopped itself. Ranks exchange values with each other and with the test
through files in one folder. They exit without MPI_Finalize, which would wait for dead ranks.

::

    run ── mpiexec ─┬─ guard 0 ── rank 0    python -m MODULE FOLDER ARGUMENT
                    └─ guard 1 ── rank 1    ...
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import launching

SHARED_MEMORY = Path("/dev/shm")

_EXIT_S = 120.0
"""Longest time from the end of a rank's work to the exit of its process, in seconds."""

_POLL_S = 0.01
_OTHERS = ("cuda.shm", "sm_segment", "vader_segment", "osc_", "pmix", "mpich_", "halox-test-")
"""Prefixes of shared-memory files of MPI, and of files that the tests themselves create."""


@dataclass(frozen=True)
class Job:
    """A program and its number of ranks.

    Attributes
    ----------
    module : str
        Each rank runs ``python -m MODULE FOLDER ARGUMENT``.
    argument : object
        Passed as JSON.
    survivors : int
        The job ends when ranks 0 to ``survivors - 1`` have exited.
    limit_s : float
        Time after which the guards kill their ranks, in seconds.
    """

    module: str
    argument: Any
    ranks: int = 2
    survivors: int = 1
    limit_s: float = 600.0
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Ended:
    """Result of a job.

    Attributes
    ----------
    told : dict
        Values that ranks passed to `tell`, by name.
    exits : list of dict
        For each survivor its exit ``"status"``, or None if it was killed at the time limit.
    said : str
        Standard output and standard error of all ranks.
    left : list of str
        Files of the job that remain in shared memory.
    """

    told: dict[str, Any]
    exits: list[dict[str, Any]]
    said: str
    left: list[str]


def run(job: Job, folder: Path) -> Ended:
    """Run a job to its end or its time limit; ``folder`` receives the files of the ranks."""
    from halox.cli import launcher

    folder.mkdir(parents=True, exist_ok=True)
    before = in_shared_memory()
    environment = (
        launcher.environment(job.ranks) | {"PYTHONPATH": str(launching.ROOT)} | job.environment
    )
    for name in ("HALOX_PATH", "HALOX_NODE"):
        environment.pop(name, None)
    guard_s = job.limit_s + _EXIT_S
    words = [str(folder), str(job.survivors), str(job.limit_s), job.module]
    command = [launcher.find().path, "-n", str(job.ranks), sys.executable, "-m", "tests.failing"]
    # A job may print nothing until its time limit.
    ended = launching.run(
        [*command, *words, json.dumps(job.argument)], environment, quiet_s=guard_s + 30
    )
    told = {item.stem: json.loads(item.read_text()) for item in folder.glob("*.json")}
    nothing = {"status": None}
    exits = [told.pop(f"exit {rank}", nothing) for rank in range(job.survivors)]
    return Ended(told, exits, ended.said, left_in_memory(folder, before))


def in_shared_memory() -> set[str]:
    with suppress(OSError):
        return {entry.name for entry in os.scandir(SHARED_MEMORY)}
    return set()


def left_in_memory(folder: Path, before: set[str]) -> list[str]:
    """Return the shared-memory files that the job's ranks created or mapped, if they remain for a minute."""
    own = {line for item in folder.glob("mapped.*") for line in item.read_text().splitlines()}
    end = time.monotonic() + 60
    while True:
        # Other halox programs may run at the same time. They remove their files within the minute.
        left = sorted(
            name
            for name in in_shared_memory() - before
            if (name in own or "halox" in name) and not name.startswith(_OTHERS)
        )
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.1)


# For ranks


def tell(folder: Path, name: str, value: Any) -> None:
    """Publish a value for other ranks and the test; the rename lets readers see a whole file or no file."""
    draft = folder / f"{name}.{os.getpid()}.draft"
    draft.write_text(json.dumps(value))
    draft.rename(folder / f"{name}.json")


def read(folder: Path, name: str) -> Any:
    """Return the value that a rank passed to `tell` under this name, or None."""
    try:
        return json.loads((folder / f"{name}.json").read_text())
    except FileNotFoundError:
        return None


def wait_for(folder: Path, names: Iterable[str]) -> None:
    """Wait until ranks have called `tell` with all of these names; has no time limit."""
    for name in names:
        while not (folder / f"{name}.json").exists():
            time.sleep(_POLL_S / 2)


def meet(folder: Path, name: str, mine: int, all_of_them: Iterable[int]) -> None:
    """Barrier of some ranks without MPI."""
    tell(folder, f"{name} {mine}", None)
    wait_for(folder, [f"{name} {rank}" for rank in all_of_them])


def stop(folder: Path, rank: int, until: Sequence[str] = (), seconds: float = 0.0) -> None:
    """Stop this process by SIGSTOP until ranks have told all names in ``until``, and ``seconds`` longer."""
    tell(folder, f"stopped {rank}", {"until": list(until), "seconds": seconds})
    os.kill(os.getpid(), signal.SIGSTOP)


def note_mapped(folder: Path, rank: int) -> None:
    """Record the shared-memory files that this process has mapped, for `left_in_memory`."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    found = [line.partition(f"{SHARED_MEMORY}/")[2].removesuffix(" (deleted)") for line in maps]
    with (folder / f"mapped.{rank}").open("a") as file:
        file.writelines(f"{name}\n" for name in sorted({*found} - {""}))


# A guard


def guard(folder: Path, survivors: int, limit_s: float, module: str, argument: str) -> None:
    """Run a rank, and stay alive until the job ends, so that the launcher sees no failure."""
    number = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
    # MPICH's launcher talks to its ranks through a file descriptor that they inherit.
    inherited = [int(os.environ[name]) for name in ("PMI_FD",) if name in os.environ]
    command = [sys.executable, "-m", module, str(folder), argument]
    process = subprocess.Popen(
        command, start_new_session=True, pass_fds=inherited, stdin=subprocess.DEVNULL
    )
    end = time.monotonic() + limit_s
    try:
        if number < survivors:
            _wait_while(lambda: process.poll() is None and not _told(folder, f"done {number}"), end)
            exit_end = min(end, time.monotonic() + _EXIT_S)
            _wait_while(lambda: process.poll() is None, exit_end)
            tell(folder, f"exit {number}", {"status": process.poll()})
        exits = [f"exit {rank}" for rank in range(survivors)]
        while time.monotonic() < end and not _is_over(folder, exits):
            _wake(folder, number, process.pid)
            time.sleep(_POLL_S)
    finally:
        process.kill()
        process.wait()


def _wait_while(condition: Callable[[], bool], end: float) -> None:
    while condition() and time.monotonic() < end:
        time.sleep(_POLL_S)


def _told(folder: Path, name: str) -> bool:
    return (folder / f"{name}.json").exists()


def _is_over(folder: Path, exits: Sequence[str]) -> bool:
    """Whether all survivors have exited, or one has failed."""
    found = [read(folder, name) for name in exits if _told(folder, name)]
    return len(found) == len(exits) or any(one["status"] != 0 for one in found)


def _wake(folder: Path, number: int, pid: int) -> None:
    """Resume a rank that has called `stop`, once its condition is met."""
    asked = read(folder, f"stopped {number}")
    if asked is None or not _is_stopped(pid):
        return
    if not all(_told(folder, name) for name in asked["until"]):
        return
    time.sleep(asked["seconds"])
    (folder / f"stopped {number}.json").unlink()
    os.kill(pid, signal.SIGCONT)


def _is_stopped(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "T"


if __name__ == "__main__":
    place, number_of_survivors, seconds, what, argument = sys.argv[1:]
    guard(Path(place), int(number_of_survivors), float(seconds), what, argument)
