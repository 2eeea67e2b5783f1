"""The page of performance figures agrees with the result files of the GPU checks."""

from __future__ import annotations

import json
import re

import pytest

from tools.gpu import figures


def test_the_page_is_that_of_the_files():
    assert figures.PAGE.read_text(encoding="utf-8") == figures.page(), (
        "run python3 -m tools.gpu.figures"
    )


TWO, FACES = "gpu-check-two-gpus.json", "both x-faces of"
README = {
    "two H200, x-faces of 512^3 cells per GPU": (
        TWO,
        f"{FACES} 512^3 float64, 2 ranks: over pack + NCCL + unpack",
    ),
    "two H200, x-faces of 64^3 cells per GPU, in a CUDA graph": (
        TWO,
        f"{FACES} 64^3 float64, 2 ranks, in a graph",
    ),
    "four H200, all six faces of 512^3 cells per GPU": (
        "gpu-check-four-gpus.json",
        "six faces of 512^3 float64, 4 ranks, in a stream",
    ),
    "one H200 shared by two ranks, x-faces of 256^3 cells per rank": (
        "gpu-check.json",
        f"{FACES} 256^3 float64, 2 ranks, in a stream",
    ),
    "two H200, sum of one number per GPU, in a CUDA graph": (
        TWO,
        "allreduce of one float64, 2 ranks, in a graph",
    ),
    "two H200, sum of 1 MiB per GPU": (
        TWO,
        "allreduce of 1MiB float64, 2 ranks, in a stream: over NCCL",
    ),
}
"""Rows of the README's table: the file and the name of each figure."""


def in_readme(row):
    """Return both times and their ratio in a row of the README's table."""
    readme = (figures.FOLDER.parents[1] / "README.md").read_text(encoding="utf-8")
    (line,) = (line for line in readme.splitlines() if line.startswith(f"| {row}"))
    return [float(re.match(r"[\d.]+", cell.strip())[0]) for cell in line.split("|")[2:5]]


@pytest.mark.parametrize("row", README)
def test_the_readme_says_what_the_files_say(row):
    """The README may differ from the file by a tenth, as two runs may."""
    file, name = README[row]
    found = json.loads((figures.FOLDER / file).read_text())["benchmarks"]
    (figure,) = (one for one in found if one["name"] == name)
    by_hand, us = figure["baseline"], figure["value"]
    us = us if figure["unit"] == "us" else us * by_hand
    assert in_readme(row) == pytest.approx([us, by_hand, by_hand / us], rel=0.1)


@pytest.mark.parametrize(("axis", "column"), [("z", 7), ("x", 3)])
def test_the_readme_says_what_the_page_of_numpy_arrays_says(axis, column):
    page = (figures.FOLDER / "host.md").read_text(encoding="utf-8")
    line = next(line for line in page.splitlines() if line.startswith("| 256 | 2 | "))
    us, by_hand = map(float, line.split("|")[column].split("/"))
    row = f"two CPU cores, {axis}-faces of 256^3 cells per rank"
    assert in_readme(row) == pytest.approx([us, by_hand, by_hand / us], rel=0.03)


def test_the_table_has_no_other_rows():
    """Each row is compared with a file above."""
    readme = (figures.FOLDER.parents[1] / "README.md").read_text(encoding="utf-8")
    table = readme.partition("<!-- figures: begin")[2].partition("<!-- figures: end")[0]
    assert len(re.findall(r"^\| [a-z]", table, re.MULTILINE)) == len(README) + 2


def test_a_figure_is_written_with_its_baseline_and_target(tmp_path):
    run = {
        "made": "now",
        "sources_sha256": "ab" * 32,
        "machine": {
            "gpus": ["G"],
            "cuda_runtime": 1,
            "cuda_driver": 2,
            "cupy": "3",
            "mpi4py": "4",
            "mpi": "M",
            "cores": 5,
        },
        "passed": 7,
        "failed": 1,
        "tests": [{"test": "t", "ranks": 2, "outcome": "failed"}],
        "benchmarks": [
            {
                "name": "a",
                "value": 1.23456,
                "unit": "us",
                "baseline": 4321.0,
                "baseline_name": "us by hand",
                "target": 1,
                "at_most": True,
                "met": False,
            },
            {"name": "b", "failed": "exit status 1"},
        ],
    }
    for file in figures.RUNS:
        (tmp_path / file).write_text(json.dumps(run))
    text = figures.page(tmp_path)
    assert "| a | 1.235 us | 4,321 us by hand | 1: **not met** |" in text
    assert "- `t` on 2 rank(s): failed" in text
    assert "| b | exit status 1 | | |" in text


def test_what_earlier_sources_gave_is_shown_where_there_is_nothing_later(tmp_path):
    def run(sources, *names):
        machine = dict.fromkeys(
            ("cuda_runtime", "cuda_driver", "cupy", "mpi4py", "mpi", "cores"), 1
        )
        figures_of = [{"name": one, "value": 1, "unit": sources} for one in names]
        return {
            "made": "now",
            "sources_sha256": sources,
            "machine": {"gpus": ["G"], **machine},
            "passed": 1,
            "failed": 0,
            "tests": [],
            "benchmarks": figures_of,
        }

    named = [("a", "b"), ("c",), ("e",), ("f",)]
    runs = [*(run("new", *names) for names in named), run("old", "a", "c", "d")]
    for file, one in zip(figures.RUNS, runs, strict=True):
        (tmp_path / file).write_text(json.dumps(one))
    text = figures.page(tmp_path)
    for row in ("| a | 1 new", "| b | 1 new", "| c | 1 new", "| d | 1 old"):
        assert row in text
    assert text.count("| a |") == text.count("| c |") == 1
    assert text.count("earlier ones") == 1
