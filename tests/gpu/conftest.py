"""Set-up and tear-down of every test on a GPU."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def finished():
    """A kernel's failure belongs to the test that launched it."""
    yield
    import cupy

    cupy.cuda.runtime.deviceSynchronize()
