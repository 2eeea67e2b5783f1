"""Checksums of parts, combined to one; the oracle is google-crc32c on the whole message."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from halox.checkpoint.checksum import PartialChecksum, linear_part, zeros_behind

crc32c = pytest.importorskip("google_crc32c")


@pytest.mark.parametrize("nbytes", [0, 1, 5, 4096, 100_003])
def test_parts_of_three_ranks_add_up(nbytes: int) -> None:
    rng = np.random.default_rng(nbytes)
    message = rng.integers(0, 256, nbytes, dtype=np.uint8)
    borders = [0, *sorted(rng.integers(0, nbytes + 1, 20).tolist()), nbytes]
    checksums = [PartialChecksum() for _ in range(3)]
    for begin, end in pairwise(borders):
        checksums[rng.integers(3)].add(message[begin:end], begin)
    found = 0
    for checksum in checksums:
        found ^= checksum.of(nbytes)
    assert found == linear_part(crc32c.value(message.tobytes()), nbytes)
    if nbytes:
        message[nbytes // 2] ^= 16
        assert found != linear_part(crc32c.value(message.tobytes()), nbytes)


@pytest.mark.parametrize("count", [0, 1, 3, 64, 1_000_001])
def test_zeros_behind(count: int) -> None:
    message = b"halox"
    before = linear_part(crc32c.value(message), len(message))
    whole = message + bytes(count)
    assert zeros_behind(before, count) == linear_part(crc32c.value(whole), len(whole))
