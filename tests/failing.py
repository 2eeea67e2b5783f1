"""Ranks that fail: two ranks exchange by one path until rank 1 stops coming, and rank 0 writes down what it sees.

`run` starts them, a pair for each path, and returns what was written down. A launcher ends all ranks when one is
killed, so it starts guards instead, and each guard starts its rank in a session of its own and never fails. Ranks
leave without MPI_Finalize, which would wait for those that are gone.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

LIMIT_S = 2.0
"""HALOX_TIMEOUT of the exchanges that fail."""

SLACK_S = 60.0
"""How much later than that the error may come: others may be busy on the same cores and GPUs."""

STORIES = ("stops", "stops between start and finish", "is killed")

_RANK_S = 300.0
_EXIT_S = 120.0
_EXCHANGES = 20


@dataclass(frozen=True)
class Pair:
    """Two ranks and the path between them; ``node`` is their HALOX_NODE."""

    path: str
    device: str
    node: str = ""

    @property
    def name(self) -> str:
        return f"{self.path}{', each a node' if self.node else ''}"


def run(
    pairs: Sequence[Pair], folder: Path, *, at_once: int = 2, limit_s: float = 500.0
) -> dict[Pair, dict[str, Any]]:
    """Start all pairs, let some of them fail at a time, and return by pair what it saw.

    ``"path"`` is why the path cannot be had, or None. By story: ``error`` (its kind), ``text``, ``seconds`` after
    rank 1's end, ``next`` (the kind of error of another call) and ``gpu_s``, the seconds until a kernel had run after
    it. ``"exit"``: status and seconds of rank 0's own end. What a rank did not come to is missing, and ``"said"`` is
    all that the ranks printed.
    """
    from halox.cli import launcher

    environment = launcher.environment(2) | {"PYTHONPATH": str(ROOT)}
    environment.pop("HALOX_PATH", None)
    started = []
    for number, pair in enumerate(pairs):
        place = folder / str(number)
        place.mkdir()
        job = json.dumps([pair.path, pair.device, pair.node])
        # Each on its own line of a log, since the launcher may be ended before it has passed on what was said.
        command = [launcher.find().path, "-n", "2", sys.executable, str(Path(__file__).resolve())]
        with (place / "said").open("w") as said:
            process = subprocess.Popen(
                [*command, "guard", str(place), job],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        started.append((process, place))
    waiting, busy = list(started), list(started[:0])
    end = time.monotonic() + limit_s
    while (waiting or busy) and time.monotonic() < end:
        busy = [(p, place) for p, place in busy if p.poll() is None and not _over(place)]
        while waiting and len(busy) < at_once:
            process, place = waiting.pop(0)
            (place / "go").touch()
            busy.append((process, place))
        time.sleep(0.02)
    found = {}
    for pair, (process, place) in zip(pairs, started, strict=True):
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(end - time.monotonic(), 5.0))
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        found[pair] = {
            item.name: json.loads(item.read_text())
            for item in place.iterdir()
            if item.suffix == "" and item.name not in ("go", "said", "over")
        } | {"said": (place / "said").read_text(errors="replace")[-6000:]}
    return found


def _over(place: Path) -> bool:
    return (place / "over").exists()


def _write(place: Path, name: str, value: Any) -> None:
    """Write a file in one go: readers see all of it or none."""
    draft = place / f"{name}.{os.getpid()}.draft"
    draft.write_text(json.dumps(value))
    draft.rename(place / name)


def _wait_for(path: Path, limit_s: float = _RANK_S) -> None:
    end = time.monotonic() + limit_s
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.005)


# A guard


def guard(place: Path, job: str) -> None:
    """Run a rank, and stay until rank 0 has ended, so that the launcher sees no failure."""
    number = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
    command = [sys.executable, __file__, "rank", str(place), job]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        if number == 0:
            _end_of_rank_0(process, place)
        else:
            _wait_for(place / "over", _RANK_S + _EXIT_S)
    finally:
        process.kill()
        process.wait()


def _end_of_rank_0(process: subprocess.Popen[bytes], place: Path) -> None:
    end = time.monotonic() + _RANK_S
    while process.poll() is None and not (place / "seen").exists() and time.monotonic() < end:
        time.sleep(0.005)
    since = time.monotonic()
    try:
        status: int | None = process.wait(_EXIT_S)
    except subprocess.TimeoutExpired:
        status = None
    _write(place, "exit", {"status": status, "seconds": time.monotonic() - since})
    (place / "over").touch()


# A rank


def rank(place: Path, path: str, device: str, node: str) -> None:
    """Go through all stories, each with a grid of its own."""
    faulthandler.dump_traceback_later(_RANK_S, exit=True)
    os.environ["HALOX_NODE"] = node
    os.environ["HALOX_TIMEOUT"] = "60"
    import mpi4py

    mpi4py.rc.finalize = False
    from mpi4py import MPI

    from halox.errors import PathError

    comm = MPI.COMM_WORLD
    kept: list[Any] = []  # what a grid that has failed holds is not given back while others go on
    try:
        # Compiles what is needed, so that this does not count as being late.
        kept.append(_planned(comm, path, device))
        reason = None
    except PathError as error:
        reason = str(error)
    if comm.rank == 0:
        _write(place, "path", reason)
    if reason is None:
        for _ in range(3):
            kept[0][-1]()
        _wait_for(place / "go")
        os.environ["HALOX_TIMEOUT"] = str(LIMIT_S)
        for story in STORIES:
            comm.Barrier()
            made = _planned(comm.Dup(), path, device)
            kept.append(made)
            if comm.rank == 0:
                _write(place, story, _watch(made[-1], device, place, story))
                (place / f"{story}.seen").touch()
            else:
                _fail(made[-1], place, story)
    if comm.rank == 0:
        _write(place, "seen", True)


def _planned(comm: Any, path: str, device: str) -> tuple[Any, ...]:
    """Make a grid, a field and its plan, used once."""
    import halox

    options: dict[str, Any] = {"periodic": True, "proc_shape": (2, 1, 1), "device": device}
    grid = halox.Grid((32, 16, 16), comm=comm, path=path, **options)
    u = grid.zeros("f8")
    plan = grid.plan(u)
    plan()
    return grid, u, plan


def _fail(plan: Any, place: Path, story: str) -> None:
    """Exchange for a while, then do what the story says."""
    for _ in range(_EXCHANGES):
        plan()
    if story == "stops between start and finish":
        plan.start()
    _write(place, f"{story}.stopped", time.time())
    if story == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    _wait_for(place / f"{story}.seen")


def _watch(plan: Any, device: str, place: Path, story: str) -> dict[str, Any]:
    """Exchange until that fails, and tell how it did."""
    from halox.errors import HaloxError

    saw: dict[str, Any] = {"exchanges": 0}
    end = time.monotonic() + LIMIT_S + SLACK_S
    try:
        while time.monotonic() < end:
            plan()
            saw["exchanges"] += 1
            if saw["exchanges"] > _EXCHANGES:
                time.sleep(0.005)  # the queue of a GPU is not to be filled to the brim
    except HaloxError as error:
        saw |= {"error": type(error).__name__, "text": str(error)}
    stopped = json.loads((place / f"{story}.stopped").read_text())
    saw["seconds"] = time.time() - stopped
    _write(place, story, saw)
    try:
        plan()
    except HaloxError as error:
        saw["next"] = type(error).__name__
    if device == "gpu":
        since = time.monotonic()
        _use_gpu()
        saw["gpu_s"] = time.monotonic() - since
    return saw


def _use_gpu() -> None:
    """Run a kernel on a stream of its own, then wait for all that the GPU was ever given."""
    import cupy

    with cupy.cuda.Stream(non_blocking=True) as stream:
        ones = cupy.ones(1000)
        ones += 1
        stream.synchronize()
    assert float(ones.sum()) == 2000
    cupy.cuda.Device().synchronize()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    role, where, text = sys.argv[1:]
    if role == "guard":
        guard(Path(where), text)
    else:
        rank(Path(where), *json.loads(text))
