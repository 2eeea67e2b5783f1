"""Reduction operations: their dtypes, and the kernels' results against NumPy's."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from halox.errors import FieldError
from halox.reductions.operations import ELEMENTS, OPERATIONS, find_operation
from halox.runtime.gpu.compiler import preamble, source
from halox.runtime.gpu.marks import Mark
from tests.fakes.cpu_kernels import SHIM, shared_library
from tests.support import require
from tests.unit.reductions.reduction_oracle import expected, same, sample

INTEGERS = [f"{kind}{n}" for kind in "iu" for n in (1, 2, 4, 8)]
FLOATS, COMPLEX, BOOL = ["f4", "f8"], ["c8", "c16"], ["?"]
MEANT = {
    **dict.fromkeys(("sum", "prod"), INTEGERS + FLOATS + COMPLEX),
    **dict.fromkeys(("min", "max"), BOOL + INTEGERS + FLOATS),
    **{
        f"{how}_{name}": BOOL + INTEGERS
        for how in ("logical", "bitwise")
        for name in ("and", "or", "xor")
    },
}
PAIRS = [(op, dtype) for op, dtypes in MEANT.items() for dtype in dtypes]


def test_every_pair_is_known_and_no_other():
    found = [
        (name, dtype)
        for name, operation in OPERATIONS.items()
        for dtype in BOOL + INTEGERS + FLOATS + COMPLEX
        if np.dtype(dtype).kind in operation.kinds
    ]
    assert sorted(found) == sorted(PAIRS)
    for name, dtype in PAIRS:
        assert find_operation(name, np.dtype(dtype)).name == name


@pytest.mark.parametrize(
    ("op", "dtype", "word"),
    [
        ("median", "f8", "op"),
        (np.add, "f8", "op"),
        ("sum", "?", "bool"),
        ("max", "c8", "complex64"),
        ("logical_and", "f8", "float64"),
        ("bitwise_xor", "c16", "complex128"),
        ("sum", "f2", "float16"),
        ("sum", "U3", "dtype"),
        ("sum", [("a", "f8")], "dtype"),
        ("sum", ">f8", "byte order"),
        ("sum", "m8[s]", "dtype"),
    ],
)
def test_what_has_no_meaning_is_refused(op, dtype, word):
    with pytest.raises(FieldError, match=word):
        find_operation(op, np.dtype(dtype))


@pytest.mark.parametrize(("op", "dtype"), PAIRS)
def test_on_the_host(op, dtype):
    values = sample(dtype, op, (5, 200))
    operation = find_operation(op, np.dtype(dtype))
    first, apart = values[0].copy(), np.empty_like(values[0])
    for total, begun in ((apart, values[0]), (first, first)):
        operation.fold(total, [begun, *values[1:]])
        assert total.dtype == np.dtype(dtype)
        assert same(total, expected(op, values))


@pytest.fixture(scope="module")
def kernels():
    require("cxx")
    folds = "".join(
        f"""
extern "C" void {op}_{np.dtype(dtype).str[1:]}(const {element(dtype)}* values, u32 ranks, u64 n, {element(dtype)}* out)
{{
    for (u64 i = 0; i < n; ++i) {{
        out[i] = {OPERATIONS[op].kernel_name}::from(values[i]);
        for (u32 rank = 1; rank < ranks; ++rank)
            out[i] = {OPERATIONS[op].kernel_name}::of(out[i], values[rank * n + i]);
    }}
}}
"""
        for op, dtype in PAIRS
    )
    text = f'#include "{SHIM}"\n{source("run_body")}{source("operations")}{folds}'
    return shared_library(text, "-Wno-unused-function")


def element(dtype):
    return ELEMENTS[np.dtype(dtype).str[1:]]


@pytest.mark.parametrize(("op", "dtype"), PAIRS)
def test_in_the_kernels(kernels, op, dtype):
    function = getattr(kernels, f"{op}_{np.dtype(dtype).str[1:]}")
    for ranks in (1, 2, 7):
        values = sample(dtype, op, (ranks, 300), ranks)
        found = np.empty(300, dtype)
        function(pointer(values), ctypes.c_uint(ranks), ctypes.c_ulonglong(300), pointer(found))
        assert same(found, expected(op, values)), ranks


def pointer(array):
    return ctypes.c_void_p(array.ctypes.data)


COMBINE = """
extern "C" void run(unsigned grid, unsigned block, u64 total, u64 first, u64 value, u64 elements, const Mark* mark)
{
    launch_on_cpu(grid, block, true, combine, total, first, value, elements, *mark);
}
extern "C" void run_copy(unsigned grid, unsigned block, u64 total, u64 value, u64 elements, const Mark* mark)
{
    launch_on_cpu(grid, block, true, copy_marked, total, value, elements, *mark);
}
"""


def launch(name, op, dtype, *arguments, mark=None):
    """Run one of the kernels that combine two arrays; Python's integers are 64-bit arguments."""
    require("cxx")
    defines = (("ELEMENT", element(dtype)), ("OP", OPERATIONS[op].kernel_name))
    text = f'{preamble(defines)}#include "{SHIM}"\n{source("combine")}{COMBINE}'
    function = getattr(shared_library(text, "-Wno-unused-function"), name)
    words = [ctypes.c_ulonglong(n) if type(n) is int else n for n in arguments]
    marks = [] if mark is None else map(ctypes.byref, mark.arguments)
    function(ctypes.c_uint(3), ctypes.c_uint(32), *words, *marks)


@pytest.mark.parametrize(("op", "dtype"), [("sum", "f8"), ("max", "i2"), ("logical_xor", "u1")])
@pytest.mark.parametrize("own", [None, 1, 3])
def test_arrays_of_one_gpu(op, dtype, own):
    """Kernel ``combine``, array by array; the result may be the last array, and the first launch leaves a mark."""
    values = sample(dtype, op, (4, 301))
    scratch, result = np.zeros(301, dtype), np.zeros(302, dtype)
    words, found = np.array([1, 0, 0, 0], "u4"), np.array([8], "u4")
    names = np.array([found.ctypes.data], "u8")
    arrays = [value.copy() for value in values]
    target = result if own is None else arrays[own]
    total = arrays[0]
    for rank in range(1, 4):
        to = target if rank == 3 else scratch
        addresses = to.ctypes.data, total.ctypes.data, arrays[rank].ctypes.data
        mark = Mark(words.ctypes.data if rank == 1 else 0, True, names.ctypes.data, 1, 9)
        launch("run", op, dtype, *addresses, 301, mark=mark)
        total = to
    assert same(target[:301], expected(op, values)) and words.tolist() == [0, 1, 8, 1]


def test_a_copy_that_leaves_a_mark():
    """Kernel ``copy_marked``, with elements of any size."""
    (values,) = sample("f8", "sum", (1, 301))
    for has_mark in (0, 1):
        total, words = np.zeros(302), np.zeros(4, "u4")
        addresses = total.ctypes.data, values.ctypes.data
        mark = Mark(words.ctypes.data * has_mark, False)
        launch("run_copy", "sum", "f8", *addresses, 301, mark=mark)
        assert total[:301].tobytes() == values.tobytes() and total[301] == 0
        assert words.tolist() == [has_mark, 0, 0, 0]
