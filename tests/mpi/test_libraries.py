"""The programs of docs/recipes/gpu-libraries.md on several ranks, where PyTorch, Numba, Warp or JAX is installed."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(
    r"^```\{code-block\} python\n:name: (\w+)\n\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
PROGRAMS = dict(BLOCK.findall((DOCS / "recipes" / "gpu-libraries.md").read_text()))

pytestmark = [pytest.mark.ranks(1, 2, 4), pytest.mark.usually(2)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_run(name: str, tmp_path: Path) -> None:
    """From a file, since Warp and Numba read the source. The programs compare sums themselves."""
    pytest.importorskip(name.partition("_")[0])
    program = tmp_path / f"{name}_program.py"
    program.write_text(PROGRAMS[name])
    runpy.run_path(str(program))
