"""The random number generator against the test vectors of Random123 (kat_vectors, philox4x32 10)."""

from __future__ import annotations

import numpy as np
import pytest

from halox.sampling.random_numbers import philox

ONES = 0xFFFFFFFF
PI = 0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0
VECTORS = [
    ((0,) * 6, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 6, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("words", "expected"), VECTORS)
def test_vectors(words: tuple[int, ...], expected: tuple[int, ...]) -> None:
    a, b, c, d, first, second = words
    assert philox((a, b, c, d), (first, second)) == expected
    arrays = [np.full(3, word, "u8") for word in (a, b, c, d)]
    for given in (arrays, [arrays[0], b, c, d], [a, b, c, arrays[3]]):
        for pairs in (1, 2):
            found = philox(given, (first, second), pairs=pairs)[: 2 * pairs]
            values = [np.broadcast_to(word, 3) & ONES for word in found]
            assert [array.tolist() for array in values] == [[w] * 3 for w in expected[: 2 * pairs]]
