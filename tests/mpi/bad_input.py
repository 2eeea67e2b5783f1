"""Tables of bad input: all ranks raise an error of one class, and its text has a word such as the argument's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import HaloxError

Table = dict[str, tuple[Callable[[MPI.Intracomm], Any], type[HaloxError], str]]
"""By name: a call, its error class, and a word of the error's text. A name that ends in " >1" needs several ranks."""


def check_error(table: Table, name: str, comm: MPI.Intracomm) -> None:
    """Make the call of an entry on all ranks, and assert its error."""
    _, _, most = name.partition(" >")
    if most and comm.size <= int(most):
        return  # needs more ranks; tests/test_ranks.py runs it on more
    call, kind, word = table[name]
    with pytest.raises(HaloxError) as caught:
        call(comm)
    assert set(comm.allgather(type(caught.value))) == {kind}
    assert word in str(caught.value), caught.value


def read_only(grid: halox.Grid, dtype: Any = "f8") -> np.ndarray:
    array = np.zeros(grid.padded_shape, dtype)
    array.flags.writeable = False
    return array
