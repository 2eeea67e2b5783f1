"""The page of figures says what the GPU checks found."""

from __future__ import annotations

import json

from tests.gpu import figures


def test_the_page_is_that_of_the_files():
    assert figures.PAGE.read_text(encoding="utf-8") == figures.page(), (
        "run python3 -m tests.gpu.figures"
    )


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
