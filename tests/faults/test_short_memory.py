"""With too little shared memory for a field or a plan, messages go through MPI, and `explain` gives the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.programs import private_memory, result, why_no_private_memory


def check(found: list[dict[str, Any]], rests: set[str]) -> None:
    """Assert that all values are right on all ranks, and that `explain` gives the reason if no field fits."""
    assert len(found) == 2
    for rank in found:
        assert set(rank) == rests
        assert all(all(told["right"]) for told in rank.values()), rank
        reasons = rank["nothing"]["reasons"]
        assert any("/dev/shm has too little" in reason for reason in reasons), reasons
        assert all(reason.startswith("host/") for reason in reasons), reasons


def test_the_system_says_so(tmp_path: Path) -> None:
    check(result(["tests.faults.short_memory", "told"], tmp_path / "found"), {"nothing"})


def test_it_is_full_but_for_a_rest(tmp_path: Path) -> None:
    """The rest suffices for flags, for the field of one rank, or for the fields of both and nothing more."""
    reason = why_no_private_memory()
    if reason is not None:
        pytest.skip(f"needs a /dev/shm of its own: {reason}")
    words = ["tests.faults.short_memory", "full"]
    found = result(words, tmp_path / "found", before=private_memory("200m"))
    check(found, {"nothing", "one", "both"})
