"""`tests.launching`: a stuck run prints the stack of every rank, and no process survives it."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from halox.cli import launcher
from tests.launching import run
from tests.support import becomes, require

STUCK = """
import faulthandler, os, sys, time
faulthandler.enable()
def here():
    print("rank is here,", os.getpid(), flush=True)
    open(os.path.join(sys.argv[1], str(os.getpid())), "w").close()
    time.sleep(3000)
here()
"""


def test_a_stuck_run_prints_the_stack_of_every_rank(tmp_path: Path) -> None:
    require("mpi")
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    folder = tmp_path / "ranks"
    folder.mkdir()
    command = [launcher.find().path, "-n", "3", sys.executable, str(script), str(folder)]
    # The ranks may need long for their start.
    ended = run(
        command,
        launcher.environment(3),
        quiet_s=1.0,
        has_begun=lambda: len(list(folder.iterdir())) == 3,
    )
    assert ended.status is None
    assert ended.said.count("Fatal Python error: Aborted") == 3, ended.said
    assert ended.said.count("in here") == 3, ended.said
    pids = re.findall(r"rank is here, (\d+)", ended.said)
    assert len(pids) == 3
    # Killed processes remain in /proc until init has reaped them.
    assert becomes(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids))


def test_a_run_that_ends_by_itself() -> None:
    ended = run([sys.executable, "-c", "print('done'); raise SystemExit(3)"], {})
    assert (ended.status, ended.said) == (3, "done\n")


def test_a_launcher_with_the_process_number_of_a_killed_one(tmp_path: Path) -> None:
    """With Open MPI 5 this failed, since the killed launcher has left its session folder in /tmp."""
    require("mpi")
    folders = tmp_path / "folders"

    def leave_folder() -> None:
        left = Path(tempfile.gettempdir(), f"ompi.{os.getpid()}")
        left.mkdir(exist_ok=True)  # another killed launcher may have left it
        folders.write_text(str(left))
        for name in ("tool", f"tool.{os.getpid()}"):
            (left / f"pmix.{socket.gethostname()}.{name}").touch()

    try:
        ended = subprocess.run(
            [launcher.find().path, "-n", "1", "true"],
            env=launcher.environment(1),
            preexec_fn=leave_folder,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, ended.stderr
    finally:
        shutil.rmtree(folders.read_text(), ignore_errors=True)
