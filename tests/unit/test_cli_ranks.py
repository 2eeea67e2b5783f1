"""``halox run`` as a user types it, on several ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests import support
from tests.failing import in_shared_memory, left_in_memory
from tests.support import becomes

ROOT = Path(__file__).resolve().parents[2]


halox_run = partial(support.halox, "run")


def stencil(ranks: int, *words: str) -> dict[str, Any]:
    common = ("--passes", "1", "--warmup-passes", "0", "--device", "cpu")
    figures = support.verified("stencil2d", "-n", str(ranks), *common, *words)
    assert figures["ranks"] == ranks
    for checks in figures["checks"].values():
        assert checks["equals_one_rank"] is True
    return figures


# tests/mpi/test_stencil2d.py has all of them, without starting ranks for each.
COMMANDS = [("weak", 4, 2), ("strong", 2, 4)]


@pytest.mark.parametrize(
    ("scaling", "every", "ranks"),
    [
        pytest.param(*case, marks=() if case in COMMANDS else pytest.mark.full)
        for case in product(("weak", "strong"), (1, 2, 4), (2, 4))
    ],
)
def test_stencil(scaling: str, every: int, ranks: int) -> None:
    # 41 x 54 is uneven over every process grid if it is cut; 23 steps end between two exchanges.
    figures = stencil(
        ranks,
        *("--custom-size", "41,54", "--num-iters", "23"),
        *("--scaling", scaling, "--iters-per-exchange", str(every)),
    )
    margin = 2 * (every - 1)
    tiles = (2, ranks // 2) if scaling == "weak" else (1, 1)
    assert figures["points"] == [41 * tiles[0] + margin, 54 * tiles[1] + margin]


def test_bytes_exchanged_are_those_of_the_faces() -> None:
    # Two ranks, one above the other: each sends one row of 30 points in each of 10 exchanges, and
    # no corners, for there is nobody at the sides.
    size = ("--custom-size", "20,30", "--num-iters", "10")
    figures = stencil(2, *size)
    assert [row["bytes_exchanged"] for row in figures["rows"]] == [2 * 30 * 4 * 10, 2 * 30 * 8 * 10]
    # With a halo of 2 the plane is one point wider on each side, and there are half as many
    # exchanges of two rows.
    wide = stencil(2, *size, "--iters-per-exchange", "2")
    assert [row["bytes_exchanged"] for row in wide["rows"]] == [2 * 64 * 4 * 5, 2 * 64 * 8 * 5]


def test_reference_numbers_on_four_ranks() -> None:
    figures = stencil(
        4,
        *("--size", "1", "--num-iters", "100", "--scaling", "strong", "--msize", "1,4"),
        *("--exact-weights", "--precision", "double"),
    )
    assert figures["checks"]["double"]["reference_numbers"] is True


def test_an_error_of_all_ranks_is_told_once() -> None:
    ended = halox_run("stencil2d", "-n", "2", "--msize", "2,2")
    assert ended.returncode == 2
    assert ended.stderr.count("has 4 places, but this run has 2 ranks") == 1
    assert "Traceback" not in ended.stderr


def test_a_picture_that_cannot_be_written_is_an_error_of_all_ranks(tmp_path: Path) -> None:
    """A folder of that name is noticed by rank 0 alone, when the others are done."""
    pytest.importorskip("matplotlib")
    (tmp_path / "a.png").mkdir()
    ended = halox_run(
        *("stencil2d", "-n", "2", "--custom-size", "9,9", "--num-iters", "1", "--passes", "1"),
        *("--device", "cpu", "--png", str(tmp_path / "a.png")),
    )
    assert ended.returncode == 2
    assert "verified: yes" in ended.stdout
    assert ended.stderr.count("a.png failed: [Errno 21]") == 1 and "Traceback" not in ended.stderr


def test_an_error_of_one_rank_ends_all(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from mpi4py import MPI\n"
        "from halox.cli.run import together\n"
        "together(MPI.COMM_WORLD, lambda: 1 // MPI.COMM_WORLD.rank and MPI.COMM_WORLD.bcast(0))\n"
    )
    ended = support.on_ranks(2, str(program))
    assert ended.returncode not in (0, 2)
    assert "ZeroDivisionError" in ended.stderr and "rank 0 failed" in ended.stderr


def test_inside_a_launcher_it_runs_on_the_ranks_that_are_there() -> None:
    words = "run stencil2d --custom-size 9,9 --num-iters 3 --passes 1 --device cpu --json"
    ended = support.halox_under_launcher(2, *words.split())
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["ranks"] == 2


SCRIPT = """
import json, os, sys
before = sorted({"numpy", "mpi4py", "halox"} & set(sys.modules))
from mpi4py import MPI
import helper
comm = MPI.COMM_WORLD
given = "" if "NO_INPUT" in os.environ else sys.stdin.read()
found = [__name__, __file__, sys.path[0], sys.argv[1:], before, helper.__file__, len(given)]
found = comm.gather(found)
if comm.rank == 0:
    print(json.dumps(found))
if len(sys.argv) == 2:
    sys.exit(int(sys.argv[1]))
"""

FAILING = """
import sys
import halox
grid = halox.Grid((8, 8))
u = grid.ones()
grid.exchange(u)

def fail():
    raise ValueError("broken on purpose")

print("going", flush=True)
if sys.argv[1] == "one" and grid.rank == 1:
    fail()
if sys.argv[1] == "all":
    grid.exchange(u[0])
while True:
    grid.exchange(u)
"""

EARLY = """
import os
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
if rank == "1":
    import nothing_of_this_name
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
"""


STUBBORN = """
import os, signal, sys, time
from pathlib import Path
import halox
from tests.failing import note_mapped
grid = halox.Grid((8, 8), halo=1)
u = grid.ones()
grid.exchange(u)
if grid.rank == 1:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
note_mapped(Path(), grid.rank)
Path(f"pid {grid.rank}").write_text(str(os.getpid()))
grid.comm.Barrier()
if grid.rank == 0:
    print("going", flush=True)
if grid.rank == 0 and sys.argv[1] == "term":
    os.kill(os.getpid(), signal.SIGTERM)
if grid.rank == 0 and sys.argv[1] == "raise":
    raise ValueError("broken on purpose")
time.sleep(1000)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Scripts, in another folder than the one that `halox run` is called in."""
    place = tmp_path / "scripts"
    place.mkdir()
    (place / "helper.py").touch()
    scripts = {"look": SCRIPT, "failing": FAILING, "early": EARLY, "stubborn": STUBBORN}
    for name, text in scripts.items():
        (place / f"{name}.py").write_text(text)
    return place


def looked(folder: Path, arguments: list[str], given: str) -> list[object]:
    """Return the list that the script must print on a rank."""
    script = str(folder / "look.py")
    helper = str(folder / "helper.py")
    return ["__main__", script, str(folder), arguments, [], helper, len(given)]


def test_a_script_alone(folder: Path, tmp_path: Path) -> None:
    ended = halox_run("scripts/look.py", "5", cwd=tmp_path, given="x" * 9)
    assert ended.returncode == 5 and ended.stderr == ""
    assert json.loads(ended.stdout) == [looked(folder, ["5"], "x" * 9)]
    ended = halox_run("-m", "look", "--", "-n", "7", cwd=folder)
    assert json.loads(ended.stdout) == [looked(folder, ["-n", "7"], "")]
    ended = halox_run("failing.py", "all", cwd=folder)
    assert ended.returncode == 2 and ended.stderr.startswith("Traceback")
    assert "runner.py" not in ended.stderr and "runpy" not in ended.stderr
    assert "FieldError: array: shape (10,)" in ended.stderr


def test_a_script_on_ranks(folder: Path, tmp_path: Path) -> None:
    # Launchers read a lone colon as their own, never hand on the end of the input, or fall behind a long one.
    words, given = [":", "", "--steps", "10", "-n", "7"], "line\n" * 30_000
    ended = halox_run("scripts/look.py", "-n", "2", *words, cwd=tmp_path, given=given)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == [
        looked(folder, words, given),
        looked(folder, words, ""),
    ]
    assert ended.stderr == ""


def test_a_script_s_own_exit_status_on_ranks(folder: Path) -> None:
    ended = halox_run("look.py", "-n", "2", "3", cwd=folder)
    assert ended.returncode == 3 and "halox run" not in ended.stderr


def test_an_exception_of_one_rank_ends_the_script_on_all(folder: Path) -> None:
    # The others wait in an exchange, for 300 s.
    ended = halox_run("failing.py", "-n", "3", "one", cwd=folder)
    assert ended.returncode not in (0, 2)
    told = "halox run: rank 1 failed: ValueError: broken on purpose\n"
    traceback, line, _ = ended.stderr.partition(told)
    assert line and traceback.count("Traceback") == ended.stderr.count("Traceback") == 1
    assert 'failing.py", line 9, in fail' in traceback and "runner.py" not in traceback
    assert ended.stdout.count("going") == 3


def test_an_error_of_all_ranks_of_a_script_is_told_once(folder: Path) -> None:
    ended = halox_run("failing.py", "-n", "2", "all", cwd=folder)
    assert ended.returncode == 2
    assert ended.stderr.count("halox run: all 2 ranks failed: FieldError: ") == 1
    assert ended.stderr.count('failing.py", line 15, in <module>') == 1


def test_a_rank_that_fails_before_mpi_has_started_ends_all(folder: Path) -> None:
    ended = halox_run("early.py", "-n", "2", cwd=folder)
    assert ended.returncode != 0
    assert ended.stderr.count("Traceback") == 1
    assert "halox run: rank 1 failed: ModuleNotFoundError: No module named" in ended.stderr


def test_ctrl_c_ends_a_script(folder: Path) -> None:
    support.require("mpi")
    process = subprocess.Popen(
        [sys.executable, "-m", "halox", "run", "failing.py", "-n", "2", "none"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and "going" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=500)
    finally:
        process.kill()
        process.wait()
    assert process.returncode != 0 and said.count("Traceback") <= 1


def is_running(pid: int) -> bool:
    """Whether there is a process, other than as a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("end", ["term", "raise", "SIGINT", "SIGTERM", "SIGKILL"])
def test_no_rank_outlives_the_others(end: str, folder: Path) -> None:
    """One rank ignores SIGTERM and SIGINT. Another one, or the launcher, ends: so do all, and halox leaves no file."""
    support.require("mpi")
    before = in_shared_memory()
    process = subprocess.Popen(
        [sys.executable, "-m", "halox", "run", "stubborn.py", "-n", "2", end],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pids: list[int] = []
    try:
        assert process.stdout is not None and "going" in process.stdout.readline()
        pids += [int((folder / f"pid {rank}").read_text()) for rank in range(2)]
        if end.startswith("SIG"):
            process.send_signal(signal.Signals[end])
        _, said = process.communicate(timeout=500)
        assert becomes(lambda: not any(map(is_running, pids)))
    finally:
        process.kill()
        process.wait()
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)
    if end == "SIGKILL":
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode not in (0, 2), said
    assert ("halox run: rank 0 failed: ValueError: broken on purpose" in said) == (end == "raise")
    assert not left_in_memory(folder, before)


def test_a_script_inside_a_launcher(folder: Path) -> None:
    support.require("mpi")
    from halox.cli import launcher

    # Under Open MPI 5's own mpiexec standard input has no end.
    environ = launcher.environment(2) | {"PYTHONPATH": str(ROOT), "NO_INPUT": "1"}
    del environ[launcher.STARTED_BY_HALOX]
    for words, status in (("run look.py -- a b", 0), ("run look.py -n 3", 2)):
        ended = subprocess.run(
            [launcher.find().path, "-n", "2", sys.executable, "-m", "halox", *words.split()],
            env=environ,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert ended.returncode == status, ended.stderr
        if status == 0:
            assert [rank[3] for rank in json.loads(ended.stdout)] == [["a", "b"]] * 2
        else:
            assert "inside a launcher that has started 2 ranks" in ended.stderr
