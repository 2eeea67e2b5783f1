"""Garbage collection in the middle of a call.

Python's collector may run finalizers between any two instructions, also while halox holds a lock or has half updated a
list. These helpers drop the last reference to an object before a chosen bytecode instruction of halox.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import halox

_PACKAGE = Path(halox.__file__).parent


class Steps:
    """Counter of the instructions executed so far."""

    count = 0


@contextmanager
def collecting(doomed: list[Any], is_due: Callable[[int], bool], *modules: str) -> Iterator[Steps]:
    """Pop one object from ``doomed`` before each instruction with a number for which ``is_due`` returns True.

    Counts only instructions of halox modules with paths, relative to the package, that begin with one of ``modules``.
    """
    places = tuple(str(_PACKAGE / module) for module in modules)
    steps = Steps()

    def in_module(frame: FrameType, event: str, _: object) -> Any:
        if event in ("opcode", "line"):  # CPython 3.13.0 omits some opcode events
            if doomed and is_due(steps.count):
                doomed.pop()
            steps.count += 1
        return in_module

    def anywhere(frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(places):
            return None
        frame.f_trace_opcodes = True
        return in_module

    before = sys.gettrace()
    # CPython 3.12 traces opcodes only if a frame asks for them when settrace is called.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(anywhere)
    try:
        yield steps
    finally:
        sys.settrace(before)


def at_each_instruction(
    make: Callable[[], tuple[list[Any], Callable[[], object]]], modules: Sequence[str]
) -> int:
    """Repeat a call with a collection before its first instruction, then before its second, and so on.

    ``make`` returns new objects to collect and the call. Returns the number of instructions of the call.
    """
    number = 0
    while True:
        doomed, call = make()
        with collecting(doomed, lambda step, due=number: step == due, *modules) as steps:  # type: ignore[misc]
            call()
        doomed.clear()
        if steps.count <= number:
            return number
        number += 1
