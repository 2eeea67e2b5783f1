"""The operations on CuPy arrays: ``milc.cu``, launched on the current stream.

The methods have the arguments and meaning of `HostKernels`; vectors are ``(3, t, z, y, x / 2)``. The arguments of a
launch are prepared in advance, so that a call only launches. The shape of the block is a compile-time constant.

Device-memory traffic of an iteration in bytes per site, if vectors of neighbours hit the caches; single precision has
half of it. The traffic gives the shortest possible time::

                          matrices   vectors                     improved   naive
    dslash    t = D p     144 * 16   p, t                            2400    1248
    normal    ap = p, t   144 * 16   t, p, ap                        2448    1296
    reduce    r           -          r twice, ap                      144     144
    update   x, p        -          x and p twice, r                 240     240
                                                                     5232    2928
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..common import Kernel
from ..device import kernels
from .lattice import COLORS, Lattice, directions
from .links import Table
from .state import SLOTS, Slot

VECTOR, MATRIX = 3, 9
"""Complex numbers of a vector and of a matrix."""


THREADS = 128
"""Threads of a block; a power of two."""


def iteration_bytes(directions: int, itemsize: int) -> dict[str, int]:
    """Return the bytes per site of the kernels of an iteration, for complex numbers of ``itemsize`` bytes.

    Examples
    --------
    >>> iteration_bytes(16, 16)
    {'dslash': 2400, 'normal': 2448, 'reduce': 144, 'update': 240}
    """
    matrices = MATRIX * directions
    numbers = {
        "dslash": matrices + 2 * VECTOR,
        "normal": matrices + 3 * VECTOR,
        "reduce": 3 * VECTOR,
        "update": 5 * VECTOR,
    }
    return {name: count * itemsize for name, count in numbers.items()}


class DeviceKernels:
    """Factory of operations that are bound to their arrays: functions without arguments.

    Parameters
    ----------
    lattice : Lattice
        With components first.
    dtype : dtype
        complex64 or complex128.
    xp : module, optional
        CuPy, by default ``lattice.grid.xp``.
    """

    def __init__(self, lattice: Lattice, dtype: np.dtype[Any], xp: Any = None) -> None:
        self._grid, self._xp = lattice.grid, lattice.grid.xp
        self._dtype = np.dtype(dtype)
        shape = self._grid.rank_shape
        self._shape = (*shape[:3], shape[3] // 2)
        half = (lattice.depth + 1) // 2
        self._padded = (*(n + 2 * lattice.depth for n in shape[:3]), self._shape[3] + 2 * half)
        self._first = sum(part.start for part in self._grid.owned[:3])
        self._sites = lattice.sites
        self._directions = len(directions(lattice.offsets))
        found = kernels(
            xp or self._xp,
            __package__,
            "milc",
            ("dslash", "normal", "begin", "reduce", "update"),
            *(f"-DN{axis}={n}" for axis, n in zip("TZYH", self._shape, strict=True)),
            f"-DDEPTH={lattice.depth}",
            f"-DTHREADS={THREADS}",
            *(["-DSINGLE"] if self._dtype.itemsize == 8 else []),
        )
        self._dslash, self._normal, self._begin, self._reduce, self._update = found
        self._blocks = -(-self._sites // THREADS)
        self._partials = self._xp.zeros(self._blocks)
        self._arrived = self._xp.zeros(1, np.uint32)

    def state(self) -> Any:
        """Return the scalars of an iteration; see `HostKernels.state`."""
        return self._xp.zeros(SLOTS)

    def history(self, most: int) -> Any:
        """Return memory of ``r . r`` after each iteration."""
        return self._xp.zeros(most)

    def read(self, array: Any) -> np.ndarray:
        """Return a device array as a NumPy array; waits for the GPU."""
        found: np.ndarray = array.get()
        return found

    def write(self, array: Any, values: np.ndarray) -> None:
        """Copy values to a device array."""
        array.set(values)

    def dslash(self, table: Table, source: Any, out: Any, parity: int, state: Any) -> Kernel:
        """Return ``out = D source``; see `HostKernels.dslash`."""
        self._check(table, (source, out), ())
        return self._launch(self._dslash, table.matrices, source, out, state, self._row(parity))

    def normal(
        self, table: Table, source: Any, p: Any, out: Any, scale: float, parity: int, state: Any
    ) -> Kernel:
        """Return ``out = scale p - D source`` and this rank's sum ``p . out``; see `HostKernels.normal`."""
        self._check(table, (source, p), (out,))
        vectors = table.matrices, source, p, out
        sums = state, self._partials, self._arrived
        row = self._row(parity)
        return self._launch(self._normal, *vectors, np.float64(scale), *sums, row)

    def begin(self, b: Any, ap: Any, r: Any, p: Any, state: Any) -> Kernel:
        """Return ``r = b - ap, p = r`` and this rank's sum ``r . r``; see `HostKernels.begin`."""
        self._check(None, (p,), (b, ap, r))
        return self._launch(self._begin, b, ap, r, p, state, self._partials, self._arrived)

    def reduce(self, ap: Any, r: Any, state: Any) -> Kernel:
        """Return ``r = r - a ap`` and this rank's sum ``r . r``; see `HostKernels.reduce`."""
        self._check(None, (), (ap, r))
        return self._launch(self._reduce, ap, r, state, self._partials, self._arrived)

    def update(self, r: Any, x: Any, p: Any, state: Any, history: Any) -> Kernel:
        """Return ``x = x + a p, p = r + b p`` with a count of the iteration; see `HostKernels.update`."""
        self._check(None, (p,), (r, x))
        return self._launch(self._update, r, x, p, state, history, self._arrived)

    def sum(self, slot: Slot, a: Any, b: Any, state: Any) -> Kernel:
        """Return the reduction of the ranks' sums, which the previous kernel has computed; collective.

        On a single rank it does nothing.
        """
        if self._grid.size == 1:
            return lambda: None
        mine, target = state[Slot.LOCAL :][:1], state[slot:][:1]
        reduce = self._grid.allreduce
        return lambda: reduce(mine, out=target)

    def _row(self, parity: int) -> np.int32:
        """Return whether the sites of a parity have odd x in the first row of the block."""
        return np.int32((parity + self._first) % 2)

    def _check(
        self, table: Table | None, with_halo: tuple[Any, ...], plain: tuple[Any, ...]
    ) -> None:
        expected = [
            *(((COLORS, *self._padded), array) for array in with_halo),
            *(((COLORS, *self._shape), array) for array in plain),
        ]
        if table is not None:
            expected.append(((self._directions, COLORS, COLORS, self._sites), table.matrices))
        for shape, array in expected:
            if array.shape != shape or array.dtype != self._dtype or not array.flags.c_contiguous:
                raise ValueError(f"expected C-contiguous arrays of {self._dtype}, shape {shape}")

    def _launch(self, function: Any, *arguments: Any) -> Kernel:
        blocks, threads = (self._blocks,), (THREADS,)
        return lambda: function(blocks, threads, arguments)
