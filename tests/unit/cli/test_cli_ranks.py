"""``halox run`` on several ranks, as a user types it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests import support
from tests.failing import in_shared_memory, left_in_memory
from tests.support import becomes, full

ROOT = Path(__file__).resolve().parents[3]

halox_run = partial(support.halox, "run")


def test_rank_0_cannot_write_the_picture(tmp_path: Path) -> None:
    """The figures are printed; the error is raised on all ranks, and printed once."""
    pytest.importorskip("matplotlib")
    (tmp_path / "a.png").mkdir()
    ended = halox_run(
        *("stencil2d", "-n", "2", "--custom-size", "9,9", "--num-iters", "1", "--passes", "1"),
        *("--device", "cpu", "--png", str(tmp_path / "a.png")),
    )
    assert ended.returncode == 2
    assert "verified: yes" in ended.stdout
    assert (
        ended.stderr.count("a.png cannot be drawn: [Errno 21]") == 1
        and "Traceback" not in ended.stderr
    )


@pytest.mark.parametrize("error", ["ZeroDivisionError", "halox.errors.HaloxError"])
@pytest.mark.part(2)
def test_an_error_of_one_rank_of_an_app_ends_all(error: str, tmp_path: Path) -> None:
    """Without mpi4py's runner, too. Rank 1 waits in a broadcast."""
    program = tmp_path / "program.py"
    program.write_text(
        "import halox\n"
        "from mpi4py import MPI\n"
        "from halox.cli.run import together\n"
        "def work():\n"
        "    if MPI.COMM_WORLD.rank == 0:\n"
        f"        raise {error}('broken on purpose')\n"
        "    MPI.COMM_WORLD.bcast(None)\n"
        "together(MPI.COMM_WORLD, work)\n"
    )
    runner = f"import runpy; runpy.run_path({str(program)!r})"
    ended = support.on_ranks(2, "-c", runner)
    assert ended.returncode == 1
    assert f"{error}: broken on purpose" in ended.stderr


def test_an_app_inside_a_launcher_uses_its_ranks() -> None:
    words = "run stencil2d --custom-size 9,9 --num-iters 3 --passes 1 --device cpu --json"
    ended = support.halox_under_launcher(2, *words.split())
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["ranks"] == 2


LOOK = """
import json, sys
before = sorted({"numpy", "mpi4py.MPI", "halox"} & set(sys.modules))
from mpi4py import MPI
import helper
comm = MPI.COMM_WORLD
line = sys.stdin.readline() if comm.rank == 0 else ""
found = comm.gather([__name__, __file__, sys.path[0], sys.argv[1:], before, line])
if comm.rank == 0:
    print(json.dumps(found))
if sys.argv[1:]:
    sys.exit(int(sys.argv[-1]))
"""

ENDING = """
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
    """Scripts, in a subfolder of the folder that `halox run` is called in."""
    place = tmp_path / "scripts"
    place.mkdir()
    (place / "helper.py").touch()
    (place / "look.py").write_text(LOOK)
    (place / "ending.py").write_text(ENDING)
    return place


def looked(script: str, folder: Path, arguments: list[str], line: str) -> list[object]:
    """Return the list that the script must print for a rank."""
    return ["__main__", script, str(folder), arguments, [], line]


def test_a_script_alone(folder: Path, tmp_path: Path) -> None:
    """It runs as by Python itself, and its exit status is the status of the command."""
    path = str(folder / "look.py")
    ended = halox_run("scripts/look.py", "5", cwd=tmp_path, given="a line\n")
    assert ended.returncode == 5 and ended.stderr == ""
    assert json.loads(ended.stdout) == [looked(path, folder, ["5"], "a line\n")]
    ended = halox_run("-m", "look", "--", "-n", "7", cwd=folder)
    assert json.loads(ended.stdout) == [looked(path, folder, ["-n", "7"], "")]


@pytest.mark.parametrize("is_module", [False, True])
@pytest.mark.part(2)
def test_a_script_on_ranks(is_module: bool, folder: Path) -> None:
    words = ["-m", "look"] if is_module else ["look.py"]
    path = str(folder / "look.py") if is_module else "look.py"
    arguments = ["", "--steps", "10", "-n", "0"]
    ended = halox_run(*words, "-n", "2", *arguments, cwd=folder, given="a line\n")
    assert ended.returncode == 0 and ended.stderr == "", ended.stderr
    assert json.loads(ended.stdout) == [
        looked(path, folder, arguments, "a line\n"),
        looked(path, folder, arguments, ""),
    ]


@pytest.mark.full
def test_the_exit_status_of_a_script_on_ranks(folder: Path) -> None:
    assert halox_run("look.py", "-n", "2", "3", cwd=folder).returncode == 3


def test_a_script_inside_a_launcher(tmp_path: Path) -> None:
    script = tmp_path / "size.py"
    script.write_text(
        "import sys\nfrom mpi4py import MPI\nprint(MPI.COMM_WORLD.size, *sys.argv[1:])\n"
    )
    ended = support.halox_under_launcher(2, "run", str(script), "a", "b")
    assert (ended.returncode, ended.stdout) == (0, "2 a b\n" * 2), ended.stderr


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("end", ["raise", "SIGINT", "SIGKILL", *full("term", "SIGTERM")])
def test_no_rank_outlives_the_others(end: str, folder: Path) -> None:
    """Rank 1 ignores SIGTERM and SIGINT. If rank 0 or the launcher ends, all end, and no file of halox stays."""
    support.require("mpi")
    before = in_shared_memory()
    process = subprocess.Popen(
        [sys.executable, "-m", "halox", "run", "ending.py", "-n", "2", end],
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
        assert becomes(lambda: not any(map(is_running, pids)), 8 if end == "SIGKILL" else 120)
    finally:
        process.kill()
        process.wait()
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)
    if end == "SIGKILL":
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode not in (0, 2), said
    assert ("ValueError: broken on purpose" in said) == (end == "raise")
    assert not left_in_memory(folder, before)
