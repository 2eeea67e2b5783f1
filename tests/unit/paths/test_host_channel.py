"""Large copies are interleaved piece by piece; every piece is copied once."""

from __future__ import annotations

import numpy as np
import pytest

from halox.paths.host.packed import _in_turns


@pytest.mark.parametrize("backwards", [False, True])
def test_in_turns_copies_everything_once(backwards: bool) -> None:
    cells = np.arange(200 * 300 * 34.0).reshape(200, 300, 34)
    faces = [cells[:, :, k : k + 1] for k in (1, 32)]
    small = (np.zeros((5, 1)), cells[0, :5, :1])
    copies = [(np.zeros((200, 300, 1)), face) for face in faces] + [small]
    ordered = _in_turns(copies, 1, backwards=backwards)
    assert len(ordered) > 10 and any(copy is small for copy in ordered)
    for target, source in ordered:
        target += source
    assert all(np.array_equal(target, source) for target, source in copies)
    first = ordered[1][1]
    assert np.shares_memory(first, cells[-20:] if backwards else cells[:20])


def test_small_or_unlike_copies_stay_as_they_are() -> None:
    cells = np.zeros((200, 300, 34))
    copies = [
        (np.zeros((200, 300, 1)), cells[:, :, :1]),
        (np.zeros((150, 300, 1)), cells[:150, :, 1:2]),
    ]
    assert _in_turns(copies, 1, backwards=False) == copies
    assert _in_turns(copies[:0], 1, backwards=False) == []
    long_runs = [(np.zeros((200, 300, 34)), cells)] * 2
    assert _in_turns(long_runs, 1, backwards=False) == long_runs
