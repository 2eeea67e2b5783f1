"""Calls of a grid with arrays that it keeps launches for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import halox
from halox.errors import ClosedError

Calls = tuple[Callable[[], Any], ...]


def calls_with(grid: halox.Grid, given: Any, out: Any, field: Any, number: Any) -> Calls:
    """Allreduces of an array into a new one, in place and into another; sums of a field likewise."""
    return (
        lambda: grid.allreduce(given),
        lambda: grid.allreduce(given, out=given),
        lambda: grid.allreduce(given, out=out),
        lambda: grid.sum(field),
        lambda: grid.sum(field, out=number),
    )


def check_closed(calls: Calls) -> None:
    """All of them raise, though they were made before."""
    for call in calls:
        with pytest.raises(ClosedError):
            call()
