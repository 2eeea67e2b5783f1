"""Objects that are collected in the middle of a call: what Python's collector does at an instruction of its choice."""

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
    """Number of the instructions that have been counted so far."""

    count = 0


@contextmanager
def collecting(doomed: list[Any], is_due: Callable[[int], bool], *modules: str) -> Iterator[Steps]:
    """Drop the last of ``doomed`` before each instruction whose number is due, one after the other.

    Instructions are those of modules of halox whose paths, from the package on, begin with one of ``modules``.
    """
    places = tuple(str(_PACKAGE / module) for module in modules)
    steps = Steps()

    def in_module(frame: FrameType, event: str, _: object) -> Any:
        if event in ("opcode", "line"):  # CPython 3.13.0 leaves some of the first out
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
    sys._getframe().f_trace_opcodes = True  # CPython 3.12 looks for such a frame in settrace
    sys.settrace(anywhere)
    try:
        yield steps
    finally:
        sys.settrace(before)


def at_each_instruction(
    make: Callable[[], tuple[list[Any], Callable[[], object]]], modules: Sequence[str]
) -> int:
    """Make doomed objects and a call, and let one of them be collected at the call's first instruction, second, ...

    Returns the number of instructions.
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
