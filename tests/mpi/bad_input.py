"""Tables of bad input: all ranks raise an error of one class, and its text has a word such as the argument's name."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import HaloxError

Table = dict[str, tuple[Callable[[MPI.Intracomm], Any], type[HaloxError], str]]
"""By name: a call, its error class, and a word of the error's text. A name that ends in " >1" needs several ranks."""

HALOX = str(Path(halox.__file__).parent)


def check_error(table: Table, name: str, comm: MPI.Intracomm) -> None:
    """Make the call of an entry on all ranks, and assert its error."""
    _, _, most = name.partition(" >")
    if most and comm.size <= int(most):
        return  # needs more ranks; tests/test_ranks.py runs it on more
    call, kind, word = table[name]
    raised_by_all(comm, kind, word, lambda: call(comm))


def raised_by_all(
    comm: MPI.Intracomm, kind: type[HaloxError], word: str, call: Callable[[], Any]
) -> HaloxError:
    """Make a call on all ranks, assert that all raise the same class with a word in the text, and return the error."""
    with pytest.raises(HaloxError) as caught:
        call()
    assert set(comm.allgather(type(caught.value))) == {kind}, caught.value
    assert word in str(caught.value), caught.value
    return caught.value


def frames(error: BaseException) -> int:
    """Return the number of halox's own frames in the traceback of an error."""
    found = traceback.extract_tb(error.__traceback__)
    return sum(frame.filename.startswith(HALOX) for frame in found)


def odd_on(comm: MPI.Intracomm, rank: int = -1) -> Callable[[Any, Any], Any]:
    """Return a function of two values, which returns the first on one rank, by default the last, else the second."""
    return lambda odd, usual: odd if comm.rank == rank % comm.size else usual


def read_only(grid: halox.Grid, dtype: Any = "f8") -> np.ndarray:
    array = np.zeros(grid.padded_shape, dtype)
    array.flags.writeable = False
    return array
