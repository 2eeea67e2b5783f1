"""The scalars of a conjugate gradient: a float64 array in the memory of its vectors, so that iterations need no host.

The kernels of an iteration read and write the scalars, and do nothing unless ``STATUS`` is ``RUNNING``.
"""

from __future__ import annotations

from enum import IntEnum


class Slot(IntEnum):
    """Indices of the array; ``milc.cu`` defines the same indices."""

    STATUS = 0
    R2 = 1
    """``r . r``, summed over all ranks."""
    PAP = 2
    """``p . M^dagger M p``, summed over all ranks."""
    NEW_R2 = 3
    """``r . r`` after the current iteration."""
    TARGET = 4
    """The iteration ends when ``r . r`` is at most this."""
    ITERATIONS = 5
    MOST = 6
    """Limit of iterations."""
    LOCAL = 7
    """Sum over the sites of this rank; used on GPUs only."""


class Status(IntEnum):
    """Values of ``STATUS``."""

    RUNNING = 0
    CONVERGED = 1
    EXHAUSTED = 2
    """The limit of iterations is reached."""
    BROKEN = 3
    """``PAP`` is not positive."""


SLOTS = len(Slot)
