"""Conversion of datatypes to mpi4py and back; packing/test_host_against_mpi.py has all constructors, at random."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from halox.datatypes import (
    as_datatype,
    from_mpi,
    hindexed,
    hvector,
    primitive,
    struct,
    vector,
)
from halox.errors import DatatypeError, MissingPackageError
from tests import support

support.require("mpi")
from mpi4py import MPI  # noqa: E402

KNOWN_TO_MPI = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8", "g", "c8", "c16"]
KNOWN_TO_MPI += ["G", "S1"]


@pytest.mark.parametrize("dtype", KNOWN_TO_MPI)
def test_primitives_that_mpi_has_come_back(dtype: str) -> None:
    for ours in (primitive(dtype), vector(2, 3, 4, dtype), struct([1, 2], [0, 48], ["u1", dtype])):
        made = ours.to_mpi()
        assert from_mpi(made) == ours
        made.Free()


@pytest.mark.parametrize("dtype", ["f2", "M8[ns]", "m8[s]", "S5", "U3", "V16", ">f8", ">i2"])
def test_other_primitives_travel_as_bytes(dtype: str) -> None:
    for ours in (primitive(dtype), vector(2, 3, 4, dtype), struct([1, 2], [0, 48], ["u1", dtype])):
        made = ours.to_mpi()
        back = from_mpi(made)
        assert back.same_layout(ours)
        assert (back.lb, back.extent) == (ours.lb, ours.extent) == made.Get_extent()
        assert back == ours or back.uniform == np.uint8
        made.Free()


PREDEFINED = {"BYTE": "u1", "CHAR": "S1", "C_BOOL": "?", "UNSIGNED_SHORT": "u2", "LONG": "i8"}
FORTRAN = {"REAL": "f4", "DOUBLE_PRECISION": "f8", "DOUBLE_COMPLEX": "c16"}


@pytest.mark.parametrize(("name", "dtype"), [*PREDEFINED.items(), *FORTRAN.items()])
def test_predefined_types(name: str, dtype: str) -> None:
    theirs = getattr(MPI, name)
    if theirs == MPI.DATATYPE_NULL:  # an MPI built without Fortran
        assert name in FORTRAN
        return
    assert from_mpi(theirs) == primitive(dtype)


def test_structured_dtype() -> None:
    dtype = np.dtype([("a", "i1"), ("b", "f8", (2, 3)), ("c", "c8")], align=True)
    made = as_datatype(dtype).to_mpi()
    assert from_mpi(made) == as_datatype(dtype)
    assert made.Get_extent() == (0, dtype.itemsize)
    made.Free()


def test_taking_over_a_type_leaves_it_usable() -> None:
    inner = MPI.DOUBLE.Create_vector(2, 1, 3)
    outer = MPI.Datatype.Create_struct([1, 1], [0, 64], [inner, MPI.INT])
    first = from_mpi(outer)
    assert from_mpi(outer) == first
    assert inner.Get_size() == 16
    inner.Free()
    assert from_mpi(outer) == first  # MPI keeps the inner type for the outer one
    outer.Free()


def test_bytes_in_reverse_travel_in_reverse() -> None:
    # Open MPI up to 5.0 misinterprets a stride of -1 byte.
    for ours in (vector(5, 1, -1, "u1"), hvector(5, 1, -1, "u1")):
        made = hindexed([1], [4], ours).to_mpi()
        packed = np.zeros(5, np.uint8)
        made.Pack(np.arange(5, dtype=np.uint8), packed, 0, MPI.COMM_SELF)
        assert packed.tolist() == [4, 3, 2, 1, 0]
        assert from_mpi(made) == hindexed([1], [4], ours)
        made.Free()


def test_types_without_a_layout_are_refused() -> None:
    spread = MPI.DOUBLE.Create_darray(1, 0, [8], [MPI.DISTRIBUTE_BLOCK], [8], [1], MPI.ORDER_C)
    for theirs in (MPI.DATATYPE_NULL, spread):
        with pytest.raises(DatatypeError):
            from_mpi(theirs)
    spread.Free()


def test_without_mpi4py_the_error_says_what_to_install(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(MissingPackageError):
        primitive("f8").to_mpi()
    assert vector(2, 1, 2, "f8").size == 16
