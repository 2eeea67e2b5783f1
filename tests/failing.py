"""Ranks that fail: started so that no launcher ends the others, stopped, and let go on again.

A launcher ends all ranks when one is killed, so it starts guards instead, and each guard starts its rank in a session
of its own, wakes it up when it has stopped itself, and never fails. Ranks tell each other and the test what they saw by
files in one folder, and leave without MPI_Finalize, which would wait for those that are gone.

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
"""Longest time from the end of a rank's work to the end of its process."""

_POLL_S = 0.01
_OTHERS = ("cuda.shm", "sm_segment", "vader_segment", "osc_", "pmix", "mpich_", "halox-test-")
"""Prefixes of files in shared memory that are MPI's or a test's own."""


@dataclass(frozen=True)
class Job:
    """Ranks to start.

    Attributes
    ----------
    module : str
        Run by each rank as ``python -m MODULE FOLDER ARGUMENT``, the argument being JSON.
    survivors : int
        Ranks 0 to ``survivors - 1`` must come to their end; then the job is over.
    """

    module: str
    argument: Any
    ranks: int = 2
    survivors: int = 1
    limit_s: float = 600.0
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Ended:
    """A job that is over.

    Attributes
    ----------
    told : dict
        Values that ranks have told, by name.
    exits : list
        Of each survivor its status, None if it had to be ended.
    said : str
        All that was printed.
    left : list of str
        Files of the job in shared memory that are still there.
    """

    told: dict[str, Any]
    exits: list[dict[str, Any]]
    said: str
    left: list[str]


def run(job: Job, folder: Path) -> Ended:
    """Start the ranks, and return when they have ended, or been ended."""
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
    # Nothing may be printed for as long as the job may last.
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
    """Return the files that the job's ranks have mapped or made and that are there now and in a minute."""
    own = {line for item in folder.glob("mapped.*") for line in item.read_text().splitlines()}
    end = time.monotonic() + 60
    while True:
        # Other programs of halox may run beside this one; what is theirs is gone soon.
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
    """Write a file in one go: readers see all of it or none."""
    draft = folder / f"{name}.{os.getpid()}.draft"
    draft.write_text(json.dumps(value))
    draft.rename(folder / f"{name}.json")


def read(folder: Path, name: str) -> Any:
    """Return what was told, None if nothing was."""
    try:
        return json.loads((folder / f"{name}.json").read_text())
    except FileNotFoundError:
        return None


def wait_for(folder: Path, names: Iterable[str]) -> None:
    """Wait for things to be told; the caller's own time limit bounds it."""
    for name in names:
        while not (folder / f"{name}.json").exists():
            time.sleep(_POLL_S / 2)


def meet(folder: Path, name: str, mine: int, all_of_them: Iterable[int]) -> None:
    """Wait for other ranks without MPI."""
    tell(folder, f"{name} {mine}", None)
    wait_for(folder, [f"{name} {rank}" for rank in all_of_them])


def stop(folder: Path, rank: int, until: Sequence[str] = (), seconds: float = 0.0) -> None:
    """Stop this process by SIGSTOP until some things are told, and so many seconds more."""
    tell(folder, f"stopped {rank}", {"until": list(until), "seconds": seconds})
    os.kill(os.getpid(), signal.SIGSTOP)


def note_mapped(folder: Path, rank: int) -> None:
    """Remember which files in shared memory this process has mapped."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    found = [line.partition(f"{SHARED_MEMORY}/")[2].removesuffix(" (deleted)") for line in maps]
    with (folder / f"mapped.{rank}").open("a") as file:
        file.writelines(f"{name}\n" for name in sorted({*found} - {""}))


# A guard


def guard(folder: Path, survivors: int, limit_s: float, module: str, argument: str) -> None:
    """Run a rank, and stay until the job is over, so that the launcher sees no failure."""
    number = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
    # MPICH's launcher talks to its ranks through a file that they inherit.
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
    """Whether all survivors have ended, or one of them badly."""
    found = [read(folder, name) for name in exits if _told(folder, name)]
    return len(found) == len(exits) or any(one["status"] != 0 for one in found)


def _wake(folder: Path, number: int, pid: int) -> None:
    """Let the rank go on when what it has stopped for has come."""
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
