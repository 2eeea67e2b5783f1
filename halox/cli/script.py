"""``halox run SCRIPT.py``: a user's script or module, on ranks that are started or already run.

Options of halox are before the script's name or directly after it. The first word after the name that is not an option
of halox begins the script's arguments, which are passed unchanged. ``--`` also begins the script's arguments, and is
removed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from halox.cli import catalogue, launcher
from halox.errors import HaloxError

USAGE = """\
your own script, with the same launcher: halox run [-n RANKS] SCRIPT.py [-n RANKS] [arguments]
your own module:                         halox run [-n RANKS] -m MODULE [-n RANKS] [arguments]
The first word behind the name that is not -n begins the script's own arguments; so does --.
The name of a mini-app stands for the app; write ./NAME for a script of that name."""

RUNNER = Path(__file__).with_name("runner.py")

_DIGITS = 10


@dataclass(frozen=True)
class Script:
    """A user's program: a file's path or a module's name, the requested number of ranks, and its arguments."""

    kind: Literal["file", "module"]
    target: str
    ranks: int | None
    arguments: tuple[str, ...]


def read(words: Sequence[str]) -> Script | None:
    """Return the program in the words after ``halox run``; None if they name a mini-app, or request a list or help.

    Raises `HaloxError` if the number of ranks is invalid or given twice, if ``--json`` is given with a script, or if no
    app or file has the name.
    """
    ranks, place = _ranks(words, 0, None)
    as_json = words[place : place + 1] == ["--json"]
    if as_json:
        ranks, place = _ranks(words, place + 1, ranks)
    is_over = words[place : place + 1] == ["--"]
    place += is_over
    if place == len(words):
        return None
    kind: Literal["file", "module"] = "file"
    target = words[place]
    if target == "-m" and not is_over:
        kind, place = "module", place + 1
        if place == len(words):
            raise HaloxError("halox run -m: the name of a module must follow")
        target = words[place]
    elif (target.startswith("-") and not is_over) or not _is_script(target):
        return None
    if as_json:
        raise HaloxError(
            f"--json is for mini-apps, and {target} is a script of yours; put options of its own behind its name"
        )
    place += 1
    if not is_over:
        ranks, place = _ranks(words, place, ranks)
        place += list(words[place : place + 1]) == ["--"]
    return Script(kind, target, ranks, tuple(words[place:]))


def _ranks(words: Sequence[str], place: int, ranks: int | None) -> tuple[int | None, int]:
    """Read ``-n`` options at a position in the words; return the ranks, and the position after the options."""
    while place < len(words):
        word = words[place]
        if word in ("-n", "--ranks"):
            value = words[place + 1] if place + 1 < len(words) else ""
            step = 2
        elif word.startswith("--ranks="):
            value, step = word.removeprefix("--ranks="), 1
        elif word.startswith("-n") and word[2:].isdecimal():
            value, step = word[2:], 1
        else:
            break
        own = "if it is an option of the script's own, write -- in front of it"
        if ranks is not None:
            raise HaloxError(f"{word}: the number of ranks is given twice, {ranks} before; {own}")
        ranks = int(value) if value.isdecimal() and len(value) < _DIGITS else 0
        if ranks < 1:
            raise HaloxError(
                f"{word}: expected a number of ranks, at least 1, got {value!r}; {own}"
            )
        place += step
    return ranks, place


def _is_script(name: str) -> bool:
    """Whether a name is the name of a script, not of an app; raise `HaloxError` if it is neither."""
    path = Path(name)
    if not name.endswith(".py") and os.sep not in name:
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

    The program or the launcher replaces this process, including standard input and output, signals and exit status.
    Raises `HaloxError` if a launcher has started another number of ranks, and the errors of `launcher.fitting`.
    """
    present, asked = launcher.running_ranks(), script.ranks
    if present is None and asked is not None and asked > 1:
        line = [launcher.fitting().path, "-n", str(asked), *_python(script, asked)]
        launcher.launch(line, launcher.environment(asked) | launcher.keep_input())
    if present is not None and asked is not None and asked != present:
        raise HaloxError(launcher.wrong_size(asked, present, "halox run"))
    environ = launcher.mpi_defaults() | dict(os.environ) | launcher.python_path()
    launcher.become(_python(script, present or 1), environ)


def _python(script: Script, ranks: int) -> list[str]:
    """Return the command line of one rank."""
    # A launcher would interpret a single colon itself; the runner removes the prefix "=".
    arguments = [f"={argument}" for argument in script.arguments]
    return [sys.executable, "-P", str(RUNNER), str(ranks), script.kind, script.target, *arguments]
