"""Reductions of expressions on one GPU, against NumPy and the host's evaluation of the same expressions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import halox
from halox.reductions.expressions import MOST_FIELDS
from tests.exact import same_bits, sums
from tests.expressions import DTYPES, FIELDS, Writer, values
from tests.support import require, trials

pytestmark = pytest.mark.gpu
require("gpu")
require("mpi")

import cupy  # noqa: E402

SHAPE = (19, 23, 6)


@pytest.fixture
def grids() -> Iterator[tuple[halox.Grid, halox.Grid]]:
    """Return the grid on the GPU, and the same on the host."""
    with (
        halox.Grid(SHAPE, halo=((1, 2), 0, 1), device="gpu") as on_gpu,
        halox.Grid(SHAPE, halo=0, device="cpu") as on_host,
    ):
        yield on_gpu, on_host


def fields(grids: tuple[halox.Grid, halox.Grid], seed: int) -> tuple[dict[str, Any], ...]:
    """Return fields by name on the GPU and on the host."""
    rng = np.random.default_rng(seed)
    device: dict[str, Any] = {}
    host: dict[str, Any] = {}
    for name, dtypes in DTYPES.items():
        host[name] = values(name, dtypes[rng.integers(len(dtypes))], SHAPE, rng)
        device[name] = grids[0].full(1, host[name].dtype)
        grids[0].interior(device[name])[...] = cupy.asarray(host[name])
    return device, host


@pytest.mark.parametrize("seed", range(trials(12)))
def test_random_expressions(grids: tuple[halox.Grid, halox.Grid], seed: int) -> None:
    """Four expressions in one launch; their sums as on the host, with another order and other last bits."""
    device, host = fields(grids, seed)
    writer = Writer(np.random.default_rng(seed), {})
    texts = {
        kind: f"where(m | True, {writer.write(kind, 2)}, {writer.write(kind, 1)})"
        for kind in FIELDS
    }
    used = _used(texts)
    while len(used) > MOST_FIELDS:
        texts.popitem()
        used = _used(texts)
    for _ in range(3):  # with a prepared launch from the third call on
        found = grids[0].reduce(texts, **{name: device[name] for name in used})
    wanted = grids[1].reduce(texts, **{name: host[name] for name in used})
    finite = {kind: f"where(isfinite({t}), abs({t}), 0 * index_x)" for kind, t in texts.items()}
    finite["bool"] = texts["bool"]
    sizes = grids[1].reduce(finite, **{name: host[name] for name in used})
    for kind, value in wanted.items():
        assert found[kind].dtype == value.dtype
        atol = 1e-3 * (
            5e3 if kind == "bool" else float(sizes[kind])
        )  # comparisons may turn with last bits
        assert np.allclose(found[kind].get(), value, atol=atol, equal_nan=True), texts[kind]


def _used(texts: dict[str, str]) -> list[str]:
    """Return the names of fields in expressions."""
    trees = [ast.parse(text) for text in texts.values()]
    names = {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return sorted(names & set(DTYPES))


def test_scalars_indices_and_graphs(grids: tuple[halox.Grid, halox.Grid]) -> None:
    device, host = fields(grids, 1)
    a, b = device["a"], device["j"]
    out, scale = {"x": cupy.empty(()), "y": cupy.empty((), "i8")}, cupy.asarray(2.0)
    texts = {"x": "(a - s) ** 2 * scale", "y": "j * index_y"}
    stream = cupy.cuda.Stream(non_blocking=True)

    def reduce() -> None:
        grids[0].reduce(texts, {"x": "max", "y": "sum"}, out, a=a, j=b, s=0.5, scale=scale)

    def check() -> None:
        stream.synchronize()
        x = ((host["a"] - 0.5) ** 2 * float(scale)).max()
        y = (host["j"] * np.arange(SHAPE[1])[:, None]).sum()
        assert (float(out["x"]), int(out["y"])) == (x, y)

    with stream:
        for _ in range(3):
            reduce()
            check()
        stream.begin_capture()
        reduce()
        graph = stream.end_capture()
        scale[...] = 3.0
        graph.launch(stream)
        check()


def test_reproducible_sums_have_the_bits_of_the_host(grids: tuple[halox.Grid, halox.Grid]) -> None:
    device, host = fields(grids, 2)
    text, names = "a * b - s * a + where(a > b, a, c) / 3", "abc"
    found = grids[0].sum(text, s=0.1, reproducible=True, **{n: device[n] for n in names})
    wanted = grids[1].sum(text, s=0.1, reproducible=True, **{n: host[n] for n in names})
    assert same_bits(found.get(), wanted)
    a, b, c = (host[n] for n in names)
    assert same_bits(wanted, sums(a * b - 0.1 * a + np.where(a > b, a, c) / 3))
