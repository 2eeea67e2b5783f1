"""Fixture for every test on a GPU."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def finished():
    """Wait for the GPU after each test, so that a failing kernel fails the test that launched it."""
    yield
    import cupy

    cupy.cuda.runtime.deviceSynchronize()
