"""Tables of bad input with the expected errors, which all ranks raise and docs/errors.md lists."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import HaloxError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "errors.md"

Table = dict[str, tuple[Callable[[MPI.Intracomm], None], type[HaloxError], str]]
"""By name: a call, its error class, and a pattern of the error text. A name that ends in " >1" needs several ranks."""


def check_error(table: Table, name: str, comm: MPI.Intracomm) -> None:
    """Make the call of an entry on all ranks, and assert its error."""
    _, _, most = name.partition(" >")
    if most and comm.size <= int(most):
        return  # needs more ranks; tests/test_ranks.py runs it on more
    call, kind, text = table[name]
    with pytest.raises(kind, match=r"(?s)" + text) as caught:
        call(comm)
    kinds = comm.allgather(type(caught.value).__name__)
    assert set(kinds) == {kind.__name__}, "ranks raised different errors"
    if comm.size == 2 and comm.rank == 0:  # as on the page, without the other rank's line
        said, _, _ = str(caught.value).partition("\n[rank 1]")
        assert re.fullmatch(documented(name.partition(" >")[0]), said), said


def documented(name: str) -> str:
    """Return the error text on the page as a pattern, in which "..." matches anything."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    line = next(line for line in lines if line.startswith(f"| {name} |"))
    text = unescape(line.split(" | ", 2)[2].removesuffix(" |"))
    return ".*".join(map(re.escape, text.split("...")))


def undocumented(table: Iterable[str]) -> list[str]:
    """Return the names that the page lacks."""
    page = PAGE.read_text(encoding="utf-8")
    return [name for name in table if f"| {name.partition(' >')[0]} |" not in page]


def read_only(grid: halox.Grid, dtype: Any = "f8") -> np.ndarray:
    array = np.zeros(grid.padded_shape, dtype)
    array.flags.writeable = False
    return array
