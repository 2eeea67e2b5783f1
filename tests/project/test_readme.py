"""Figures of the README agree with the files of measurements, and the distribution has its own name."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from tools.gpu import figures

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TABLE = README.partition("<!-- figures: begin")[2].partition("<!-- figures: end")[0]

TWO, FACES = "gpu-check-two-gpus.json", "both x-faces of"
MEASURED = {
    "two H200, x-faces of 512^3": (
        TWO,
        f"{FACES} 512^3 float64, 2 ranks: over pack + NCCL + unpack",
    ),
    "two H200, x-faces of 64^3": (TWO, f"{FACES} 64^3 float64, 2 ranks, in a graph"),
    "four H200, all six faces": (
        "gpu-check-four-gpus.json",
        "six faces of 512^3 float64, 4 ranks, in a stream",
    ),
    "one H200": ("gpu-check.json", f"{FACES} 256^3 float64, 2 ranks, in a stream"),
    "two H200, sum of one number": (TWO, "allreduce of one float64, 2 ranks, in a graph"),
    "two H200, sum of 1 MiB": (TWO, "allreduce of 1MiB float64, 2 ranks, in a stream: over NCCL"),
}
"""Beginning of each row of the README's table: the file and the name of its figure."""


def test_the_readme_has_the_figures_of_the_files() -> None:
    """The README may differ from a file by a tenth, as two runs may; two rows are of NumPy arrays."""
    rows = re.findall(
        r"^\| ([a-z].*?) \| ([\d.,]+).*?\| ([\d.,]+).*?\| ([\d.]+)", TABLE, re.MULTILINE
    )
    assert len(rows) == len(MEASURED) + 2
    for start, (file, name) in MEASURED.items():
        (row,) = (row for row in rows if row[0].startswith(start))
        found = json.loads((figures.FOLDER / file).read_text())["benchmarks"]
        (figure,) = (one for one in found if one["name"] == name)
        by_hand, us = figure["baseline"], figure["value"]
        us = us if figure["unit"] == "us" else us * by_hand
        assert [float(x) for x in row[1:]] == pytest.approx([us, by_hand, by_hand / us], rel=0.1)
    page = (figures.FOLDER / "host.md").read_text(encoding="utf-8")
    line = next(line for line in page.splitlines() if line.startswith("| 256 | 2 | "))
    for axis, column in (("z", 7), ("x", 3)):
        us, by_hand = map(float, line.split("|")[column].split("/"))
        (row,) = (row for row in rows if row[0].startswith(f"two CPU cores, {axis}-faces"))
        assert [float(x) for x in row[1:]] == pytest.approx([us, by_hand, by_hand / us], rel=0.03)


def test_the_page_of_figures_is_made_from_the_files() -> None:
    assert figures.PAGE.read_text(encoding="utf-8") == figures.page(), (
        "run python3 -m tools.gpu.figures"
    )


def test_the_distribution_has_its_own_name() -> None:
    """`halox` on PyPI is another project."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "halox-mpi" and list(project["scripts"]) == ["halox"]
    texts = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "halox").rglob("*.py")]
    other = re.compile(r"pip install [^\n`]*(?<![\w./-])halox(?![\w-])")
    assert not [path for path in texts if other.search(path.read_text(encoding="utf-8"))]
