"""The multigrid mini-app on a GPU: whole runs pass NAS verification."""

from __future__ import annotations

import pytest

from tests.support import require, verified

pytestmark = pytest.mark.gpu
require("gpu")

import cupy  # noqa: E402


@pytest.mark.parametrize(
    ("name", "ranks", "graph"),
    [
        ("S", 1, False),
        ("A", 1, False),
        ("W", 1, True),
        ("A", 2, False),
        ("S", 4, False),
        ("W", 2, True),
    ],
)
def test_official_verification(name: str, ranks: int, graph: bool) -> None:
    if graph and ranks > cupy.cuda.runtime.getDeviceCount():
        pytest.skip(f"{ranks} GPUs are needed: ranks that share a GPU exchange by the host")
    words = f"--class {name} -n {ranks} --device gpu" + " --graph" * graph
    figures = verified("nas_mg", *words.split())
    assert figures["device"] == "gpu" and figures["graph"] is graph
    assert figures["checks"] == {"official_norm": True, "norms_of_first_iterations": True}
