"""Conjugate gradients and multigrid of the page about solvers, on GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from tests.project.test_docs import snippets
from tests.support import require

require("gpu")

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(1, 2, 4)]

PAGE = Path(__file__).resolve().parents[3] / "docs" / "solvers.md"


def test_the_page_runs(comm: MPI.Intracomm) -> None:
    names: dict[str, Any] = {"__name__": "solvers"}
    exec(compile(snippets(PAGE), str(PAGE), "exec"), names)
    assert names["grid"].device == "gpu" and names["grid"].size == comm.size
