"""Numbers of a conjugate gradient: an array of float64 where its vectors are, so that no iteration waits for the host.

The kernels of an iteration read and write them, and do nothing once ``STATUS`` is another than ``RUNNING``.
"""

from __future__ import annotations

from enum import IntEnum


class Slot(IntEnum):
    """Places in the array; ``milc.cu`` has the same."""

    STATUS = 0
    R2 = 1
    """``r . r``, of all ranks."""
    PAP = 2
    """``p . M^dagger M p``, of all ranks."""
    NEW_R2 = 3
    """``r . r`` after the present iteration."""
    TARGET = 4
    """Largest ``r . r`` that ends the iteration."""
    ITERATIONS = 5
    MOST = 6
    """Iterations after which it ends."""
    LOCAL = 7
    """A sum of this rank, on GPUs."""


class Status(IntEnum):
    """Values of ``STATUS``."""

    RUNNING = 0
    CONVERGED = 1
    EXHAUSTED = 2
    """No more iterations are allowed."""
    BROKEN = 3
    """``PAP`` is not positive."""


SLOTS = len(Slot)
