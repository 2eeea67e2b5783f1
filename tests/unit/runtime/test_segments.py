"""Free ranges of memory, against a map of its bytes."""

from __future__ import annotations

import numpy as np
import pytest

from halox.runtime.segments import FreeList


@pytest.mark.parametrize("seed", range(5))
def test_what_is_taken_is_nobody_elses(seed: int) -> None:
    rng = np.random.default_rng(seed)
    free, taken = FreeList(100), np.zeros(100, bool)
    pieces: list[tuple[int, int]] = []
    for _ in range(300):
        if pieces and rng.random() < 0.5:
            offset, nbytes = pieces.pop(rng.integers(len(pieces)))
            free.release(offset, nbytes)
            taken[offset : offset + nbytes] = False
        else:
            nbytes = int(rng.integers(1, 30))
            gaps = "".join("x" if one else "." for one in taken).split("x")
            found = free.allocate(nbytes)
            assert (found is None) == (max(map(len, gaps)) < nbytes), "neighbours are merged"
            if found is not None:
                assert not taken[found : found + nbytes].any()
                taken[found : found + nbytes] = True
                pieces.append((found, nbytes))
        assert free.is_whole == (not taken.any())


def test_the_smallest_range_that_fits_is_taken_from() -> None:
    free = FreeList(100)
    assert [free.allocate(n) for n in (40, 10, 20, 10)] == [0, 40, 50, 70]
    free.release(0, 40)
    free.release(50, 20)
    assert free.allocate(15) == 50 and free.allocate(30) == 0 and free.allocate(30) is None
