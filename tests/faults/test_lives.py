"""Grids, fields, plans, transposes and allreduces, made and dropped in random order."""

from __future__ import annotations

from pathlib import Path

from tests.faults.programs import number, result

STEPS = number("HALOX_LIVES", 150)
DEFAULT_SEED = 20261122
SEED = number("HALOX_SEED", DEFAULT_SEED)


def test_random_lives(tmp_path: Path) -> None:
    """All values are right in any order of calls, also if an array has the address of a former array.

    150 steps. For 10,000, in some minutes: ``HALOX_LIVES=10000 pytest tests/faults/test_lives.py -o
    faulthandler_timeout=0``. ``HALOX_SEED`` selects other random steps.
    """
    words = ["tests.faults.lives", str(STEPS), str(SEED)]
    counts = result(words, tmp_path / "counts", limit_s=550 + STEPS / 4)
    assert counts["exchange"] > STEPS / 20, counts
    # With another seed and few steps, perhaps no array gets the address of a former one.
    assert counts["memory used again"] > 0 or SEED != DEFAULT_SEED, counts
