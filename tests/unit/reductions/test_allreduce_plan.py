"""Plans of reductions of arrays beyond the sizes that a kernel can be run with here."""

from __future__ import annotations

import numpy as np
import pytest

from halox.errors import FieldError
from halox.reductions.device.kernel_plans import (
    EPOCH_SHIFT,
    LEAST_THREADS,
    MOST_CHUNKS,
    MOST_RANKS,
    THREADS,
    plan_oneshot,
    plan_scattered,
    plan_wide,
)

F8 = np.dtype("f8")


@pytest.mark.parametrize("make", [plan_oneshot, plan_wide, plan_scattered])
@pytest.mark.parametrize("elements", [1, 31, (1 << 20) + 1, 1 << 24])
def test_large_arrays_stay_within_the_limits_of_the_kernels(elements, make):
    for dtype, ranks in (("i1", 1), ("f4", 3), ("f8", MOST_RANKS)):
        plan = make(np.dtype(dtype), "sum", elements, ranks)
        assert 1 <= plan.blocks <= plan.chunks <= MOST_CHUNKS
        assert plan.chunks + plan.blocks < 1 << EPOCH_SHIFT
        assert LEAST_THREADS <= plan.threads <= THREADS
        assert plan.threads & (plan.threads - 1) == 0
        assert plan.chunk_elements * np.dtype(dtype).itemsize < 2**32
        assert plan.state_offset + 16 <= plan.partials_offset <= plan.memory_bytes
        assert plan.rank_bytes % 16 == plan.slot_bytes % 16 == plan.state_offset % 256 == 0


def test_arrays_that_are_too_large_for_packets():
    with pytest.raises(FieldError):
        plan_oneshot(F8, "sum", 1 << 30, 2)
    plan = plan_scattered(F8, "sum", 1 << 33, 2)
    assert plan.chunks <= MOST_CHUNKS
