"""Expressions of fields against NumPy: on the host, and as C++ of the kernels."""

from __future__ import annotations

import ast
import ctypes
import re
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import FieldError
from halox.reductions.device.expression_kernels import ExpressionKernel, code_of, operands
from halox.reductions.device.kernel_plans import ALLREDUCE
from halox.reductions.expressions import requested, typed
from halox.reductions.field_operations import EXACT_OPERATIONS
from halox.reductions.host.host_reductions import MOST_FIELDS
from halox.runtime.gpu.compiler import source
from tests.expressions import DTYPES, FIELDS, Writer, evaluated, values
from tests.fakes.cpu_kernels import FLAGS, compiled_once
from tests.fakes.cpu_peer import HEADER, MEMORY
from tests.support import require, trials
from tests.unit.runtime.test_kernels_nvrtc import FEW, compiled, spilled

SHAPE = (7, 5)
SCALARS: dict[str, tuple[str, Any]] = {
    "s": ("float", 0.75),
    "t": ("float", np.float32(1.25)),
    "p": ("int", 2),
    "q": ("complex", 0.5j),
    "r": ("float", np.array(-2.0)),
}
PROFILES: dict[str, tuple[str, tuple[str, Any]]] = {
    "w": ("float", ("y", np.linspace(-1, 2, SHAPE[1], dtype="f4"))),
    "l": ("int", ("x", np.arange(2 * SHAPE[0])[::2])),
}


@pytest.fixture
def grid() -> Any:
    with halox.Grid(SHAPE, halo=1, comm=MPI.COMM_SELF, device="cpu") as made:
        yield made


def sample(grid: halox.Grid, seed: int) -> tuple[str, dict[str, Any], Any]:
    """Return a random expression, its arguments, and its values by NumPy: None if NumPy refuses it."""
    rng = np.random.default_rng(seed)
    others: dict[str, tuple[str, Any]] = {**SCALARS, **PROFILES}
    writer = Writer(rng, {name: kind for name, (kind, _) in others.items()})
    kind = tuple(FIELDS)[rng.integers(4)]
    text = writer.write(kind, int(rng.integers(1, 5)))
    named: dict[str, Any] = {name: value for name, (_, value) in others.items()}
    for name, dtypes in DTYPES.items():
        dtype = dtypes[rng.integers(len(dtypes))]
        named[name] = grid.full(1, dtype)
        grid.interior(named[name])[...] = values(name, dtype, SHAPE, rng)
    if not names_in(text) & set(DTYPES):
        text = f"where(m, {text}, {text})"
    known = {
        name: grid.interior(value) if name in DTYPES else value for name, value in named.items()
    }
    known |= {"w": named["w"][1], "l": named["l"][1][:, None]}
    known["index_x"] = np.arange(SHAPE[0])[:, None]
    used = {name: named[name] for name in names_in(text) & set(named)}
    try:
        wanted = evaluated(text, known)
        if kind != "bool" and seed % 2:
            lines = {"e": text, "a": "e * e", "value": "a - e"}  # the name of a field, too
            for name, line in lines.items():
                wanted = known[name] = evaluated(line, known)
            text = f"""
                e = {text}  # the first
                a = e * e
                a - e
            """
    except (OverflowError, ZeroDivisionError, TypeError):  # of Python's numbers and their roots
        return text, used, None
    return text, used, np.broadcast_to(wanted, SHAPE)


def names_in(text: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}


def close(found: Any, wanted: Any, *, scale: Any = 0.0) -> bool:
    """Whether numbers agree up to the rounding of functions in their precision."""
    precision = 1e-4 if np.asarray(wanted).dtype in ("f4", "c8") else 1e-9
    atol = precision * float(np.max(np.where(np.isfinite(scale), np.abs(scale), 0)))
    return bool(np.allclose(found, wanted, rtol=precision, atol=atol, equal_nan=True))


def test_random_expressions(grid: Any) -> None:
    for seed in range(trials(600)):
        text, named, wanted = sample(grid, seed)
        if wanted is None:
            with pytest.raises(FieldError, match=r"^expression: "):
                grid.reduce(text, **named)
            continue
        if wanted.dtype.kind != "c":
            for op in ("min", "max"):
                found = grid.reduce(text, op, **named)
                with np.errstate(all="ignore"):
                    assert close(found, getattr(wanted, op)()), (seed, text)
                assert found.dtype == wanted.dtype, (seed, text)
        found = grid.sum(text, **named)
        wide = {"b": "i8", "i": "i8", "u": "u8", "f": "f8", "c": "c16"}[wanted.dtype.kind]
        with np.errstate(all="ignore"):
            total = wanted.sum(dtype=wide)
            assert found.dtype == wide and close(found, total, scale=wanted * 1e3), (seed, text)
            norm = np.linalg.norm(wanted.astype("c16"))
            assert close(grid.norm(text, **named), norm), (seed, text)


_FUNCTION = """
namespace e{n} {{
struct Cells {{ const u64* operand; }};
#define INPUTS(X) {INPUTS(X)}
struct Cell {{
    INPUTS(DECLARE_INPUT)
    void load(const Cells& cells, const i64* offset) {{ INPUTS(LOAD_INPUT) }}
}};
#undef INPUTS
}}
extern "C" void run{n}(const u64* operand, const i64* strides, {type}* out)
{{
    e{n}::Cells cells = {{operand}};
    for (i64 i = 0; i < {cells}; ++i) {{
        i64 offset[32];
        for (i64 n = 0; n < 32; ++n)
            offset[n] = i / {columns} * strides[2 * n] + i % {columns} * strides[2 * n + 1];
        e{n}::Cell in;
        in.load(cells, offset);
        {STEPS}
#define RESULTS_OF(X) {RESULTS_OF(X)}
        out[i] = RESULTS_OF(VALUE_OF);
#undef RESULTS_OF
    }}
}}
"""
_HEAD = f'''#define POLLS 2
#include "{HEADER}"
{source("allreduce_oneshot")}
{source("expressions")}
{MEMORY}
'''


def test_the_kernels_compute_the_same(grid: Any) -> None:
    """The C++ text of 100 expressions, compiled for the CPU, gives NumPy's value of each cell."""
    require("cxx")
    texts, runs = [_HEAD], []
    for seed in range(1000, 1100):
        text, named, wanted = sample(grid, seed)
        if wanted is None:
            continue
        call = typed(requested("reduce", text, "sum", None, named), grid.domain)
        cells = operands(call, call.program.values(named), [])
        code = code_of(call, [EXACT_OPERATIONS["sum"]], range(len(cells)))
        is_complex = wanted.dtype.kind == "c"
        type_ = "Complex<double>" if is_complex else "double"
        shape = {"type": type_, "cells": wanted.size, "columns": SHAPE[1]}
        texts.append(_FUNCTION.format(n=len(runs), **shape, **code))
        runs.append((text, named, wanted, cells))
    library = ctypes.CDLL(str(compiled_once("".join(texts), *FLAGS, "-latomic", "-Wno-unused")))
    assert len(runs) > 90
    for n, (text, _, wanted, cells) in enumerate(runs):
        out = np.zeros(SHAPE, "c16" if wanted.dtype.kind == "c" else "f8")
        words = np.array([each.pointer for each in cells], "u8")
        strides = np.zeros((32, 2), "i8")
        strides[: len(cells)] = [each.strides for each in cells]
        arrays = [ctypes.c_void_p(each.ctypes.data) for each in (words, strides, out)]
        getattr(library, f"run{n}")(*arrays)
        alike = [close(*pair) for pair in zip(out.flat, wanted.flat, strict=True)]
        # A comparison or a quotient of functions may turn with their last bits.
        most = 2 if any(f"{name}(" in text for name in ("sin", "cos", "exp", "log")) else 0
        assert alike.count(False) <= most, (text, out, wanted)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("-1 < a < b <= 3", lambda a, b: (a > -1) & (a < b) & (b <= 3)),
        ("u < j", lambda a, b: np.ones(SHAPE, bool)),
        ("index_x * 10 + index_y", lambda a, b: np.add.outer(10 * np.arange(7), np.arange(5))),
        ("1", lambda a, b: np.ones(SHAPE, int)),
    ],
)
def test_expressions_that_numpy_writes_otherwise(grid: Any, text: str, wanted: Any) -> None:
    rng = np.random.default_rng(1)
    a, b = (grid.full(1) for _ in range(2))
    for each in (a, b):
        grid.interior(each)[...] = rng.normal(size=SHAPE)
    named = {"a": a, "b": b, "u": grid.full(2, "u8"), "j": grid.full(2**53 + 1, "i8")}
    used = {name: named[name] for name in names_in(text) & set(named)}
    results = grid.reduce({"x": text, "a": "a"}, {"x": "sum", "a": "max"}, **{"a": a, **used})
    values = wanted(*map(grid.interior, (a, b)))
    assert results == {"x": values.sum(), "a": grid.interior(a).max()}


def test_scalars_do_not_change_the_dtype(grid: Any) -> None:
    """The same call with another value has the dtypes of the first one, and the errors of a first call."""
    u, cells = grid.ones(), float(np.prod(SHAPE))

    def of(text: str, n: Any) -> Any:
        try:
            return grid.reduce({"n": text, "u": "u"}, u=u, n=n)["n"]
        except FieldError as error:
            return str(error)

    assert [of("n", n) for n in (7, -1, 2)] == [7 * cells, -cells, 2 * cells]
    for n in (2**63, 2**63):
        assert "too large" in of("n", n)
    for n in (1.0, -1.0, -1.0, 1.0):
        assert of("n ** 0.5", n) == cells if n > 0 else "is complex" in of("n ** 0.5", n)
    assert of("n ** 0.5", -1 + 0j).dtype == "c16"


def test_a_grid_keeps_few_texts_on_the_host(grid: Any) -> None:
    u, cells = grid.ones(), float(np.prod(SHAPE))
    for n in [*range(MOST_FIELDS + 10), *range(3)]:
        assert grid.sum(f"u * {n}", u=u) == n * cells
        assert grid.sum(u) == cells
    assert len(grid._reductions.fields.reductions) == MOST_FIELDS


def test_an_expression_of_several_lines(grid: Any) -> None:
    text = """
        a   # the first
        + b
    """
    assert grid.max(text, a=grid.full(1), b=grid.full(2)) == 3


def test_blocks_need_no_whole_temporaries() -> None:
    with halox.Grid((1 << 11, 1 << 10), halo=1, comm=MPI.COMM_SELF, device="cpu") as grid:
        a, b = grid.full(3.0), grid.full(1.0)
        text = "where(a > b, (a - b) ** 2, exp(b)) + s"
        grid.reduce(text, a=a, b=b, s=2)
        tracemalloc.start()
        found = grid.reduce(text, a=a, b=b, s=2)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert found == 6 << 21
        assert peak < a.nbytes / 8


SIXTEEN = "ABCDEFGHIJKLMNOP"
KERNELS = [
    ("conj(u) / (1 + u)", "sum"),
    ("where(index_x > 2, a, -b) * s + j // 2 % 3", "max"),
    ({"rr": "a * a", "most": "abs(b)", "n": "j > 2"}, {"rr": "sum", "most": "max", "n": "sum"}),
    ("a * b + u", "reproducible sum"),
    (" + ".join(f"{name} * {name}" for name in SIXTEEN), "sum"),
    ("where((j > 2) | True, a, b) + where(a > b, True, False)", "sum"),
]


@pytest.mark.parametrize(("text", "op"), KERNELS, ids=str)
def test_kernels_compile_for_gpus(grid: Any, text: Any, op: Any) -> None:
    """Cells stay in registers, and products are rounded before they are added."""
    require("nvrtc")
    dtypes = {"a": "f8", "b": "f4", "u": "c16", "j": "i8"}
    dtypes |= dict.fromkeys(SIXTEEN, "f8")
    plain, name = str(text), op if isinstance(op, str) else None
    named: dict[str, Any] = {n: grid.ones(d) for n, d in dtypes.items() if n in names_of(plain)}
    named |= {"s": 0.5} if "* s" in plain else {}
    ops = name.removeprefix("reproducible ") if name else op
    request = requested("reduce", text, ops, None, named)
    if name is not None and name != ops:
        request = replace(request, is_exact=True)
    call = typed(request, grid.domain)
    kernel: Any = object.__new__(ExpressionKernel)
    kernel._call, kernel._operations = call, call.ops
    kernel._sms, kernel._ranks = 132, 2
    plans: list[Any] = []
    kernel._prepared_for = lambda plan, first: plans.append((plan, len(first)))
    kernel._layout(operands(call, call.program.values(named), [0] * (len(call.ops) - 1)))
    ((plan, parameter_bytes),) = plans
    ptx = compiled(plan.function, plan.defines, "sm_90").ptx
    assert ".local" not in ptx and max(spilled(plan.function, plan.defines)) <= FEW
    assert parameter_bytes + ALLREDUCE.itemsize + 8 * (1 + 2 * len(call.ops)) <= 4096

    assert ("mul.rn.f64" in ptx) == ("*" in plain or "/" in plain)
    assert "fma.rn.f64" not in ptx


def names_of(text: str) -> set[str]:
    return set(re.findall(r"\b[a-zA-Z]\b", text))


def test_each_text_is_an_expression_of_its_own(grid: Any) -> None:
    """Comments end with their text, and no text closes a parenthesis that it has not opened."""
    u, v = grid.full(2.0), grid.full(3.0)
    assert grid.dot("u  # velocity", "v  # pressure", u=u, v=v) == grid.dot(u, v)
    assert grid.dot("u +\n u", "v", u=u, v=v) == 2 * grid.dot(u, v)
    for text in ("u) + (u", "u] + [u", "u\n) * (u", "u, u", "(u", "u)", "*u", "u#\n)"):
        with pytest.raises(FieldError):
            grid.sum(text, u=u)
        with pytest.raises(FieldError):
            grid.dot(text, "u", u=u)
        with pytest.raises(FieldError):
            grid.dot("u", text, u=u)
    with pytest.raises(FieldError):
        grid.dot("u)) * conj(wide(u", "u", u=u)
