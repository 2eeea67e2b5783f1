"""The recipes on several ranks; tests/project/test_docs.py runs them, and all other pages, on one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.project.test_docs import snippets

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = [*sorted((DOCS / "recipes").glob("*.md"))]
PAGES += [DOCS / f"{name}.md" for name in ("allreduce", "checkpoints", "quickstart", "solvers")]

pytestmark = [pytest.mark.ranks(2, 4), pytest.mark.usually(2)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_snippets_run_on_ranks(page: Path) -> None:
    if page.stem == "checkpoints":
        pytest.importorskip("zarr")
        pytest.importorskip("xarray")
    exec(compile(snippets(page), str(page), "exec"), {"__name__": page.stem})
