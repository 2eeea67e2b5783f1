"""``halox run SCRIPT.py``: a user's script or module, on ranks that are started or already run.

``-n`` and ``--compare`` are before the program's name or directly after it. The first other word after the name begins
the program's own arguments. ``--`` also begins these arguments, and is removed.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from halox.cli import catalogue, launcher
from halox.errors import HaloxError

USAGE = """\
your own script, with the same launcher: halox run [-n RANKS] SCRIPT.py [-n RANKS] [arguments]
your own module:                         halox run [-n RANKS] -m MODULE [-n RANKS] [arguments]
The first word behind the name that is not -n or --compare begins the script's own arguments; so does --.
The name of a mini-app stands for the app; write ./NAME for a script of that name.
--compare RANKS (or cpu), beside -n, runs it on other ranks, too (or without GPUs), and shows the first difference."""

_OPTION = re.compile(r"(-n|--ranks|--compare)(?:=?(\d+|cpu))?")


@dataclass(frozen=True)
class Script:
    """A user's program: the arguments of Python that run it, and the values of ``-n`` and ``--compare``."""

    arguments: tuple[str, ...]
    ranks: int | None
    compare: str | None = None


def read(words: Sequence[str]) -> Script | None:
    """Return the program in the words after ``halox run``; None if they name a mini-app, or request a list or help.

    Raises `HaloxError` if the number of ranks is invalid or given twice, or if no app or file has the name.
    """
    rest = list(words)
    taken: dict[str, str] = {}
    _take_options(rest, taken)
    if rest[:1] == ["-m"]:
        program = rest[:2]
        if len(program) == 1:
            raise HaloxError("halox run -m: the name of a module must follow")
        del rest[:2]
    elif not rest or rest[0].startswith("-"):
        return None
    elif _is_script(rest[0]):
        program = [rest.pop(0)]
    elif any(word.startswith("--compare") for word in words):
        program = ["-m", "halox", "run", rest.pop(0)]
    else:
        return None
    _take_options(rest, taken)
    if len(program) == 4 and "--compare" not in taken:
        return None  # a wrong option of the app
    if rest[:1] == ["--"]:
        del rest[0]
    ranks = int(taken["-n"]) if "-n" in taken else None
    return Script((*program, *rest), ranks, taken.get("--compare"))


def _take_options(words: list[str], taken: dict[str, str]) -> None:
    """Move ``-n`` and ``--compare`` from the front of the words to ``taken``."""
    while words and (match := _OPTION.fullmatch(words[0])):
        option = words.pop(0)
        name = "--compare" if match[1] == "--compare" else "-n"
        value = match[2] or (words.pop(0) if words else "")
        own = "if it is an option of the script's own, write -- in front of it"
        if name in taken:
            raise HaloxError(
                f"{option}: the number of ranks is given twice, {taken[name]} before; {own}"
            )
        is_number = value.isdecimal() and int(value) > 0
        if not is_number and (name, value) != ("--compare", "cpu"):
            raise HaloxError(
                f"{option}: expected a number of ranks, at least 1, got {value!r}; {own}"
            )
        taken[name] = value


def _is_script(name: str) -> bool:
    """Whether a word names a script, not a mini-app; raises `HaloxError` if it names neither."""
    path = Path(name)
    if path.suffix != ".py" and "/" not in name:
        apps = catalogue.names()
        if name in apps:
            return False
        if not path.is_file():
            raise HaloxError(
                f"{name!r} is neither a mini-app ({', '.join(apps)}) nor a file here; run a script of yours by its "
                f"file (halox run {name}.py -n 4) or its module (halox run -m {name} -n 4)"
            )
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is no file"
        raise HaloxError(
            f"the script {name!r} {what}; give the path of a Python file, or a module with -m"
        )
    return True


def start(script: Script) -> NoReturn:
    """Become the program, for one rank, or the launcher that runs it on several ranks.

    Raises `HaloxError` if a launcher has started another number of ranks, and the errors of `launcher.fitting`.
    """
    present, asked = launcher.running_ranks(), script.ranks
    if present is None and asked is not None and asked > 1:
        launcher.start(asked, script.arguments)
    if present is not None and asked is not None and asked != present:
        raise HaloxError(launcher.wrong_size(asked, present, "halox run"))
    python = (
        launcher.python(script.arguments)
        if (present or 1) > 1
        else [sys.executable, *script.arguments]
    )
    environ = launcher.mpi_defaults() | dict(os.environ) | launcher.python_path()
    os.execve(sys.executable, python, environ)
