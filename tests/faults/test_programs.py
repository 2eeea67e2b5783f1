"""Whole programs: calls after MPI.Finalize, an exception on one rank, a late rank."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent

import pytest

from tests.faults.finalised import LOCAL
from tests.faults.programs import start
from tests.support import full


@pytest.mark.parametrize("ranks", [2, *full(1)])
def test_after_finalize(ranks: int, tmp_path: Path) -> None:
    """Every call that needs MPI raises an error of halox; no call aborts the process."""
    place = tmp_path / "found"
    ended = start(["-m", "tests.faults.finalised", str(place)], ranks=ranks)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
    for rank in range(ranks):
        found = json.loads(Path(f"{place}.{rank}").read_text())
        wrong = {
            name: text
            for name, text in found.items()
            if not (text.startswith("HaloxError") or (name in LOCAL and text == "returned"))
        }
        assert not wrong, wrong
        # Calls of closed objects say so; the creation of a new object names MPI.Finalize.
        assert "MPI" in found["Grid"] and "inali" in found["Grid"], found["Grid"]


RAISING = """
    import halox
    g = halox.Grid((8, 8), periodic=True, proc_shape=(2, 1), device="cpu")
    u = g.ones()
    g.exchange(u)
    if g.rank == 1:
        raise RuntimeError("this program is wrong")
    {call}
    print("rank 0 has gone on", flush=True)
    g.comm.Barrier()
"""


@pytest.mark.parametrize(
    "call",
    [
        "g.sum(u)",
        *(pytest.param(c, marks=pytest.mark.full) for c in ("g.exchange(u)", "g.close()", "pass")),
    ],
)
def test_an_exception_on_one_rank(call: str, tmp_path: Path) -> None:
    """Under a plain mpiexec all ranks end at once, also a rank that waits in MPI."""
    script = tmp_path / "wrong.py"
    script.write_text(dedent(RAISING).format(call=call))
    ended = start([str(script)], plain=True)
    said = ended.stdout + ended.stderr
    assert ended.returncode != 0, said
    assert "RuntimeError: this program is wrong" in said
    assert "halox: RuntimeError on rank 1 of 2; all ranks end" in said
    # The other rank has not waited for HALOX_TIMEOUT.
    assert "ExchangeTimeoutError" not in said


TOGETHER = """
    import numpy as np
    import halox
    g = halox.Grid((12, 8), device="cpu")
    {call}
"""


@pytest.mark.parametrize(
    ("call", "texts", "plain"),
    [
        (
            "g.exchange(np.zeros(g.grid_shape))",
            ["FieldError: array: (12, 8) is the whole grid's shape: grid.scatter"],
            False,
        ),
        *full(("[][g.size]", ["IndexError: list index out of range"], True)),
        *full(
            (
                "g.exchange(np.zeros(g.grid_shape))",
                ["is the whole grid's shape: grid.scatter(array)"],
                True,
            )
        ),
        ("[].index(g.rank)", [f"ValueError: {n} is not in list" for n in range(3)], True),
    ],
)
def test_an_exception_of_all_ranks_is_printed_once(
    call: str, texts: list[str], plain: bool, tmp_path: Path
) -> None:
    """Exceptions with other texts are printed by each rank."""
    script = tmp_path / "wrong.py"
    script.write_text(dedent(TOGETHER).format(call=call))
    ended = start([str(script)], ranks=3, plain=plain)
    said = ended.stdout + ended.stderr
    assert ended.returncode != 0, said
    assert [said.count(text) for text in texts] == [1] * len(texts), said
    assert said.count("Traceback") == len(texts) and "mpi4py" not in said, said
    assert len(texts) > 1 or "on ranks 0, 1, 2 of 3; all ranks end" in said


HOOKED = """
    import sys
    import halox
    g = halox.Grid((8, 8), periodic=True, proc_shape=(2, 1), device="cpu")
    sys.excepthook = lambda kind, error, traceback: print("the program's hook:", error, flush=True)
    if g.rank == 1:
        raise RuntimeError("this program is wrong")
    g.comm.Barrier()
"""


def test_an_exception_and_a_hook_of_the_program(tmp_path: Path) -> None:
    """All ranks end too if the program replaces the hook of halox after its first grid."""
    script = tmp_path / "hooked.py"
    script.write_text(dedent(HOOKED))
    ended = start([str(script)], plain=True)
    said = ended.stdout + ended.stderr
    assert ended.returncode != 0, said
    assert "the program's hook: this program is wrong" in said
    assert "halox: RuntimeError on rank 1 of 2; all ranks end" in said


LATE = """
    import time
    import halox
    g = halox.Grid((8, 8), periodic=True, proc_shape=(2, 1), device="cpu")
    u = g.ones()
    g.exchange(u)
    u[0] = 2.0
    if g.rank == 1:
        time.sleep({seconds})
    g.exchange(u)
    assert (u == 1.0).all()
    if g.rank == 1:
        time.sleep(0.5)
    assert g.sum(u) == 64
    print("rank", g.rank, "is right", flush=True)
"""


@pytest.mark.full
def test_a_rank_that_is_late_is_told_of_once(tmp_path: Path) -> None:
    """After ten seconds of waiting one rank prints a single line, which names the late rank and the call."""
    script = tmp_path / "late.py"
    script.write_text(dedent(LATE).format(seconds=25))
    ended = start([str(script)])
    assert ended.returncode == 0 and ended.stdout.count("is right") == 2, ended
    lines = [line for line in ended.stderr.splitlines() if "rank 1" in line]
    assert len(lines) == 1 and "exchange" in lines[0], ended.stderr


@pytest.mark.full
def test_ranks_that_are_in_time_print_nothing(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(dedent(LATE).format(seconds=2))
    ended = start([str(script)])
    assert ended.returncode == 0 and ended.stdout.count("is right") == 2, ended
    assert not ended.stderr.strip(), ended.stderr


UNMATCHED = """
    import os
    import sys
    import time
    import numpy as np
    import halox
    from halox.paths import buffers
    modules = [*sys.modules.values()]  # so that Python clears them when it ends
    g = halox.Grid((8, 8), periodic=True, proc_shape=(2, 1), device="cpu")
    plan = g.plan(np.ones((1000, *g.padded_shape)))
    if g.rank == 0:
        buffers.Buffer.__del__ = lambda self, write=os.write: write(2, b"freed\\n")
    else:
        time.sleep(1)  # rank 0 ends first
    plan.start()
    if sys.argv[1] == "closed":
        plan.close()
    print("rank", g.rank, "ends", flush=True)
"""


@pytest.mark.parametrize("plan", ["open", "closed"])
def test_receives_that_are_unmatched_when_python_ends(plan: str, tmp_path: Path) -> None:
    """MPI is finalized after the interpreter, and may write to the buffers of receives until then."""
    script = tmp_path / "unmatched.py"
    script.write_text(dedent(UNMATCHED))
    ended = start([str(script), plan], environment={"HALOX_NODE": "rank"}, plain=True)
    assert ended.returncode == 0 and ended.stdout.count("ends") == 2, ended
    assert "freed" not in ended.stderr
