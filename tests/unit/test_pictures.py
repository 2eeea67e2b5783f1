"""The pictures of the documentation that scripts compute."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from tests import support

DOCS = Path(__file__).resolve().parents[2] / "docs"


def script(name: str, folder: str = "images") -> Any:
    spec = importlib.util.spec_from_file_location(name, DOCS / folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    found = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


ON_WHITE = {"packing-bandwidth.png"}
"""This picture shows measurements on a GPU; site.css inverts it on dark pages."""


@pytest.mark.parametrize(
    "path", sorted((DOCS / "images").glob("*.png")), ids=lambda path: path.name
)
def test_pictures_suit_light_and_dark_pages(path: Path) -> None:
    """The corners are transparent."""
    corners = imread(path)[[0, 0, -1, -1], [0, -1, 0, -1]]
    assert corners.shape == (4, 4), "no alpha"
    assert (corners[:, 3] == (path.name in ON_WHITE)).all(), (
        "draw it in docs/images: see matplotlibrc there"
    )


def test_a_checkerboarded_face() -> None:
    """The halo consists of the even sites outside the block at a distance of 1 or 3 from an odd site in it."""
    support.require("mpi")
    owned, halo = script("checkerboard").even_sites()
    block = set(product(range(8), range(8)))
    assert owned == {site for site in block if sum(site) % 2 == 0}
    read = {
        there
        for y, x in block - owned
        for d in (-3, -1, 1, 3)
        for there in ((y + d, x), (y, x + d))
    }
    assert halo == read - block


def _check(made: str, gpus: int, times: dict[int, float]) -> dict[str, Any]:
    others = {"pack + NCCL + unpack": 1000.0, "zero-copy + mpi4py": 1000.0}
    return {
        "made": made,
        "machine": {"gpus": ["NVIDIA H200"] * gpus},
        "benchmarks": [
            {
                "name": f"both x-faces of {cells}^3 float64, 2 ranks, in a stream",
                "others": {"selected": us, **others},
            }
            for cells, us in times.items()
        ],
    }


def test_a_plot_shows_the_newest_check_of_its_machine() -> None:
    """The axes are logarithmic, so that times with equal ratios are at equal distances."""
    support.require("sphinx")
    measured = script("measured", "_ext")
    times = {16: 1.0, 32: 10.0, 64: 100.0, 128: 1000.0}
    old = _check("2026-01-01T00", 2, dict.fromkeys(times, 5.0))
    short = _check("2026-03-01T00", 2, {16: 7.0})
    other = _check("2026-04-01T00", 1, dict.fromkeys(times, 7.0))
    spec = replace(measured.TIMES["exchange"], at=128)
    plot = measured.times([other, short, _check("2026-02-01T00", 2, times), old], spec)
    assert "2026-02-01" in plot.caption and "At N = 128: halox 1,000" in plot.caption
    marks = re.findall(r'class="mark s0" cx="([0-9.]+)" cy="([0-9.]+)"', plot.svg)
    assert len(marks) == 4
    for place in range(2):
        steps = [float(b[place]) - float(a[place]) for a, b in pairwise(marks)]
        assert steps == pytest.approx([steps[0]] * 3, abs=0.2) and steps[0] != 0
    with pytest.raises(LookupError, match="no check"):
        measured.times([other, short], spec)


def test_the_plot_of_cores_reads_its_table(tmp_path: Path) -> None:
    """Only rows of two ranks count, of the first table alone."""
    support.require("sphinx")
    page = tmp_path / "host.md"
    page.write_text(
        "| N | ranks | x | | y | | z | |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| 64 | 2 | 1.5 / 2.5 | 2 x | 3 / 4 | 1 x | 5 / 6 | 1 x |\n"
        "| 128 | 2 | 7 / 8.5 | 2 x | 9 / 10 | 1 x | 11 / 12 | 1 x |\n"
        "| 128 | 4 | 13 / 14 | 2 x | 15 / 16 | 1 x | 17 / 18 | 1 x |\n\n"
        "| 256 | 2 | 19 / 20 | 2 x | 21 / 22 | 1 x | 23 / 24 | 1 x |\n"
    )
    measured = script("measured", "_ext")
    for axis, values in (
        ("x", "halox 7, mpi4py by hand 8.5"),
        ("z", "halox 11, mpi4py by hand 12"),
    ):
        plot = measured.on_cores(axis, page)
        assert f"At N = 128: {values}." in plot.caption
        assert len(re.findall("<circle", plot.svg)) == 4


def test_bars_are_as_long_as_their_values() -> None:
    support.require("sphinx")
    drawn = script("measured", "_ext").bars("", {"a": [1000.0, 250.0], "b": [500.0, 125.0]}, "")
    widths = [float(width) for width in re.findall(r'width="([0-9.]+)"', drawn)]
    assert [width / widths[0] for width in widths] == pytest.approx([1, 0.25, 0.5, 0.125], abs=0.01)


def test_the_plots_are_of_the_committed_files() -> None:
    support.require("sphinx")
    measured = script("measured", "_ext")
    points = {
        "exchange": 18,
        "exchange-graph": 12,
        "exchange-four": 9,
        "exchange-shared": 8,
        "allreduce": 30,
        "allreduce-graph": 14,
        "packing": 6,
        "cores-x": 6,
        "cores-z": 6,
    }
    assert set(points) == set(measured.PLOTS)
    for name, least in points.items():
        drawn = measured.html(name)
        assert len(re.findall(r"<circle|<rect", drawn)) >= least, name
