"""Start programs on ranks as a user does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from halox.cli import launcher
from tests.support import require

ROOT = Path(__file__).resolve().parents[2]


def start(
    arguments: Sequence[str],
    *,
    ranks: int = 2,
    limit_s: float = 550.0,
    environment: Mapping[str, str] | None = None,
    plain: bool = False,
    before: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run Python on ranks, and return the completed process.

    Parameters
    ----------
    plain : bool
        As ``mpiexec -n 2 python ...``, without mpi4py's runner, which aborts all ranks after an exception on one.
    before : sequence of str
        Words in front of the command line.
    """
    require("mpi")
    found = launcher.find()
    line = launcher.command(found, ranks, arguments)
    if plain:
        line = [found.path, "-n", str(ranks), sys.executable, *arguments]
    settings = launcher.environment(ranks) | {"PYTHONPATH": str(ROOT), "HALOX_TIMEOUT": "60"}
    for name in ("HALOX_PATH", "HALOX_NODE"):
        settings.pop(name, None)
    try:
        return subprocess.run(
            [*before, *line],
            cwd=ROOT,
            env=settings | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        said = [text.decode(errors="replace") for text in (late.stdout, late.stderr) if text]
        pytest.fail(f"took longer than {limit_s} s\n{''.join(said)[-6000:]}")


def result(arguments: Sequence[str], place: Path, **options: Any) -> Any:
    """Run a module of this folder that writes its result as JSON, and return the result."""
    ended = start(["-m", *arguments, str(place)], **options)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
    return json.loads(place.read_text())


def number(name: str, default: int) -> int:
    """Return an integer from the environment, by which a user asks for a longer run."""
    return int(os.environ.get(name, default))


@cache
def why_no_private_memory() -> str | None:
    """Return the reason why no private /dev/shm can be mounted here, None if it can."""
    if shutil.which("unshare") is None:
        return "no program 'unshare' on the PATH"
    tried = subprocess.run(
        [*private_memory("1m"), "true"], capture_output=True, text=True, timeout=60, check=False
    )
    said = tried.stderr.strip() or f"status {tried.returncode}"
    return None if tried.returncode == 0 else f"a file system cannot be mounted: {said}"


def private_memory(size: str, folder: str = "/dev/shm") -> list[str]:
    """Return the words in front of a command that mount a private file system of this size, by default at /dev/shm."""
    script = f'mount -t tmpfs -o size={size} halox-test {folder} && exec "$@"'
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]
