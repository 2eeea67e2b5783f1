"""Plans of strided copies beyond the sizes that a kernel can be run with here; test_strided.py runs the others."""

from __future__ import annotations

import numpy as np

from halox.datatypes import StridedBlocks
from halox.packing.refine import Copy, Side, contiguous_side
from halox.packing.strided_plan import MAX_LEVELS, MAX_WORDS, plan


def test_huge_regions_are_cut() -> None:
    """36 GiB in words of 4 bytes: the number of words exceeds 32 bits."""
    nbytes = 36 << 30
    copy = Copy(contiguous_side(4, nbytes), contiguous_side((1 << 40) + 8, nbytes))
    planned = plan([copy], sms=132)
    assert len(planned.regions) == 5
    assert planned.regions["words"].max() <= MAX_WORDS
    assert planned.nbytes == nbytes
    ends = planned.regions["source"] + planned.regions["words"] * np.uint64(4)
    assert (ends[:-1] == planned.regions["source"][1:]).all()


def test_long_runs_are_cut() -> None:
    """5 GiB at odd addresses: the bytes of the run exceed 32 bits."""
    nbytes = (5 << 30) + 7
    copy = Copy(contiguous_side(1, nbytes), contiguous_side((1 << 40) + 2, nbytes))
    planned = plan([copy], sms=132)
    assert planned.regions["run_bytes"].tolist() == [1 << 30] * 5 + [7]
    assert planned.nbytes == nbytes


def test_more_levels_than_a_region_has() -> None:
    counts, strides = (3, 2, 5, 3, 2, 3), (10**6, 10**5, 10**4, 10**3, 100, 20)
    side = Side(0, StridedBlocks(0, counts, strides, 16))
    planned = plan([Copy(side, contiguous_side(1 << 40, side.strided.nbytes))], sms=4)
    assert planned.levels == MAX_LEVELS
    assert planned.nbytes == side.strided.nbytes
    assert len(planned.regions) == 4, "the two shortest levels are unrolled"
