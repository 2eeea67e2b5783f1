"""Reductions of a grid for which it keeps prepared launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import halox
from halox.errors import ClosedError

Calls = tuple[Callable[[], Any], ...]


def calls_with(grid: halox.Grid, given: Any, out: Any, field: Any, number: Any) -> Calls:
    """Return allreduces to a new array, in place and to ``out``; sums of a field to a new array and to ``number``."""
    return (
        lambda: grid.allreduce(given),
        lambda: grid.allreduce(given, out=given),
        lambda: grid.allreduce(given, out=out),
        lambda: grid.sum(field),
        lambda: grid.sum(field, out=number),
    )


def check_closed(calls: Calls) -> None:
    """Assert that all calls raise ClosedError, although their launches were prepared."""
    for call in calls:
        with pytest.raises(ClosedError):
            call()
