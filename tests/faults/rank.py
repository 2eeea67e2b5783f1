"""One rank of the fault matrix: ``python -m tests.faults.rank FOLDER ARGUMENT``, started by a guard of `tests.failing`.

A story is one row of the matrix, on two ranks: rank 0 is the survivor, the other rank the victim of the fault. Each
story has its own communicators, so that a rank that has left one story can take part in the next. Stories that kill
their victim have different victims.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from halox.runtime import waiting
from tests.failing import meet, note_mapped, read, stop, tell, wait_for
from tests.faults.table import LIMIT_S, PATIENT_S, SHORT_S, SLACK_S, STAGES, Row

_PREPARING_S = 90.0
_TRIES = 3


class Interruption(BaseException):
    """Stands for a KeyboardInterrupt, which may interrupt any statement."""


def main(folder: Path, stories: list[list[str]]) -> None:
    """Play all stories in turn."""
    faulthandler.enable()
    os.environ["HALOX_TIMEOUT"] = f"{PATIENT_S}"
    waiting._BUSY_S = 0.02  # a survivor sleeps while it waits, since others need its core
    import mpi4py

    mpi4py.rc.finalize = False
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rows = [Row(*story) for story in stories]
    casts = [[0, 1 + number % (world.size - 1)] for number in range(len(rows))]
    # Create the first story's communicators last. Open MPI numbers communicators in the order of their creation. A
    # fault may leave the duplication of one unfinished; then Open MPI cannot duplicate any with a higher number.
    comms: list[Any] = []
    for cast in reversed(casts):
        group = world.group.Incl(cast)
        in_it = world.rank in cast
        comms.append([world.Create_group(group) for _ in "ab"] if in_it else None)
    comms.reverse()
    kept: list[Any] = []
    known: dict[tuple[str, str, int], int] = {}
    for number, (row, cast) in enumerate(zip(rows, casts, strict=True)):
        if world.rank in cast:
            story = Story(folder, number, row, cast, comms[number], kept, known)
            saw = story.play()
            note_mapped(folder, world.rank)
            tell(folder, f"{number} saw {cast.index(world.rank)}", saw)
    if rows[-1].fault != "killed" and world.rank in casts[-1]:
        faulthandler.dump_traceback_later(_PREPARING_S, exit=True)
        # The guards kill a slower victim, and a survivor would notice the end of its process.
        wait_for(folder, [f"{len(rows) - 1} saw {1 - casts[-1].index(world.rank)}"])
    faulthandler.cancel_dump_traceback_later()
    tell(folder, f"done {world.rank}", None)


class Story:
    """One row, played on one rank."""

    def __init__(
        self,
        folder: Path,
        number: int,
        row: Row,
        cast: list[int],
        comms: list[Any],
        kept: list[Any],
        known: dict[tuple[str, str, int], int],
    ) -> None:
        from tests.faults.calls import CALLS

        self._folder, self._number, self._row, self._cast = folder, number, row, cast
        self._comm, self._side = comms
        self._kept, self._known = kept, known
        self._call = CALLS[row.call]
        self._is_victim = self._comm.rank == self._comm.size - 1

    def play(self) -> dict[str, Any]:
        """Play the story, and return the outcome on this rank."""
        from tests.faults.calls import Scene

        row = self._row
        if row.fault != "killed" or not self._is_victim:  # a rank to be killed may wait for long
            faulthandler.dump_traceback_later(_PREPARING_S, exit=True)
        meet(self._folder, f"{self._number} begins", self._comm.rank, range(self._comm.size))
        faulthandler.dump_traceback_later(_PREPARING_S, exit=True)
        os.environ["HALOX_NODE"] = "rank" if row.path.endswith("/mpi") else ""
        os.environ["HALOX_TIMEOUT"] = f"{PATIENT_S}"
        try:
            functions = self._rehearsed()
        except Exception as error:
            return {"unprepared": f"{type(error).__name__}: {error}"}
        os.environ["HALOX_TIMEOUT"] = f"{row.limit_s}"
        for _ in range(_TRIES):
            scene = Scene(self._comm, row.path)
            self._kept.append(scene)
            said = None
            try:
                self._call.prepare(scene)
            except Exception as error:  # a rank may be late on a busy machine
                said = f"{type(error).__name__}: {error}"
            others = self._side.allgather(said)
            if not any(others):
                break
        else:
            return {"unprepared": others}
        # A story that takes longer has failed.
        faulthandler.dump_traceback_later(LIMIT_S + SLACK_S + 2, exit=True)
        if not self._is_victim:
            return self._watch(scene)
        at = max(1, round(STAGES[row.stage] * functions))
        return self._suffer(scene, 0 if row.stage == "before" else at)

    def _rehearsed(self) -> int:
        """Make the call without a fault, and return the number of halox functions that it enters."""
        from tests.faults.calls import Scene

        key = (self._row.call, self._row.path, self._cast[-1])
        if key not in self._known:
            # The first call compiles and imports; the second is counted.
            for _ in range(2):
                scene = Scene(self._side, self._row.path)
                self._kept.append(scene)
                self._call.prepare(scene)
                with Entering() as entering:
                    result = self._call.act(scene)
                assert self._call.right(scene, result), f"{key} goes wrong without any fault"
            self._known[key] = entering.count
        return self._known[key]

    # The victim

    def _suffer(self, scene: Any, at: int) -> dict[str, Any]:
        fault = self._row.fault
        if fault == "elsewhere":
            self._tell_fault("elsewhere")
            return self._outcome(lambda: self._call.other(scene), time.monotonic())

        def happen(where: str) -> None:
            note_mapped(self._folder, self._cast[-1])
            self._tell_fault(where)
            if fault == "killed":
                os.kill(os.getpid(), 9)
            if fault == "raising":
                raise Interruption
            survivor = [f"{self._number} saw 0"]
            until, seconds = ([], SHORT_S) if self._row.is_short else (survivor, 0.0)
            stop(self._folder, self._cast[-1], until, seconds)

        entering = Entering(at, happen)
        try:
            if not at:
                happen("before")
            with entering:
                result = self._call.act(scene)
            if at and entering.count < at:
                happen("after")
        except Interruption:
            return {"outcome": "raised"}
        except Exception as error:
            return _seen(error)
        return self._returned(scene, result)

    def _tell_fault(self, where: str) -> None:
        tell(self._folder, f"{self._number} fault", {"time": time.monotonic(), "where": where})

    # The survivor

    def _watch(self, scene: Any) -> dict[str, Any]:
        """Make the call, and later calls until one fails; return the outcome."""
        call, row = self._call, self._row
        began = time.monotonic()
        saw = self._outcome(lambda: call.act(scene), began, scene)
        if row.is_short or row.fault == "elsewhere" or call.may_return:
            return saw
        end = began + LIMIT_S + SLACK_S
        while saw["outcome"] == "returned" and time.monotonic() < end:
            saw = {"later": True} | self._outcome(lambda: call.again(scene), began)
            time.sleep(0.005)  # do not fill the launch queue of a GPU
        if saw["outcome"] == "returned":
            return saw
        if call.refused:
            saw["next"] = self._outcome(lambda: call.again(scene), began)["outcome"]
        if scene.device == "gpu":
            since = time.monotonic()
            _use_gpu()
            saw["gpu_s"] = time.monotonic() - since
        return saw

    def _outcome(self, act: Any, began: float, scene: Any = None) -> dict[str, Any]:
        try:
            result = act()
        except Exception as error:
            found = _seen(error)
        else:
            found = self._returned(scene, result)
        ended = time.monotonic()
        fault = read(self._folder, f"{self._number} fault")
        found["waited_s"] = ended - began
        found["late_s"] = ended - max(began, fault["time"] if fault else began)
        found["where"] = fault and fault["where"]
        return found

    def _returned(self, scene: Any, result: Any) -> dict[str, Any]:
        found: dict[str, Any] = {"outcome": "returned"}
        if self._row.is_short and scene is not None:
            try:
                found["right"] = bool(self._call.right(scene, result))
            except Exception as error:
                found |= _seen(error)
        return found


def _seen(error: Exception) -> dict[str, Any]:
    from halox.errors import HaloxError

    return {
        "outcome": type(error).__name__,
        "is_halox": isinstance(error, HaloxError),
        "text": str(error),
    }


class Entering:
    """Count the distinct halox functions that are entered, and call ``act`` when their number reaches ``at``."""

    def __init__(self, at: int = -1, act: Any = None) -> None:
        import halox

        self._root = str(Path(halox.__file__).parent)
        self._at, self._act = at, act
        self._entered: set[Any] = set()

    @property
    def count(self) -> int:
        return len(self._entered)

    def has_entered(self, name: str) -> bool:
        return any(code.co_qualname == name for code in self._entered)

    def __enter__(self) -> Entering:
        if self._at:
            sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code in self._entered or code.co_name == "<module>":
            return
        if not code.co_filename.startswith(self._root):
            return
        self._entered.add(code)
        if self.count == self._at:
            sys.setprofile(None)
            self._act(code.co_qualname)


def _use_gpu() -> None:
    """Run a kernel on a new stream, then wait for all streams of the GPU."""
    import cupy

    with cupy.cuda.Stream(non_blocking=True) as stream:
        ones = cupy.ones(1000)
        ones += 1
        stream.synchronize()
    assert float(ones.sum()) == 2000
    cupy.cuda.Device().synchronize()


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        main(Path(sys.argv[1]), **json.loads(sys.argv[2]))
