"""Grids, fields, plans, transposes and allreduces that are made and dropped in random order."""

from __future__ import annotations

from pathlib import Path

from tests.faults.programs import number, result

STEPS = number("HALOX_LIVES", 150)
DEFAULT_SEED = 20261122
SEED = number("HALOX_SEED", DEFAULT_SEED)


def test_random_lives(tmp_path: Path) -> None:
    """Whatever is made and dropped, all values are right, arrays at addresses of former ones included.

    150 steps; 10,000, in some minutes, with ``HALOX_LIVES=10000 pytest tests/faults/test_lives.py -o
    faulthandler_timeout=0``. ``HALOX_SEED`` gives other ones.
    """
    words = ["tests.faults.lives", str(STEPS), str(SEED)]
    counts = result(words, tmp_path / "counts", limit_s=550 + STEPS / 4)
    assert counts["exchange"] > STEPS / 20, counts
    # With few steps of other seeds no array may happen to come to lie where another has been.
    assert counts["memory used again"] > 0 or SEED != DEFAULT_SEED, counts
