"""Many exchanges of NumPy arrays with random delays of ranks; tests/gpu/ranks/test_delays_gpu.py tests GPU arrays."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.calls import CPU_PATHS
from tests.faults.programs import number, result

EXCHANGES = number("HALOX_SOAK", 2000)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("soak") / "found"
    return result(["tests.faults.soak", str(EXCHANGES)], place, limit_s=550 + EXCHANGES / 100)


@pytest.mark.parametrize("path", CPU_PATHS)
def test_delays(path: str, found: dict[str, Any]) -> None:
    """Every cell of every field is right after every exchange.

    2,000 exchanges per path. For a million, in some minutes: ``HALOX_SOAK=1000000 pytest tests/faults/test_soak.py -o
    faulthandler_timeout=0``.
    """
    assert found[path] == [{"exchanges": EXCHANGES, "wrong": 0}] * 2
