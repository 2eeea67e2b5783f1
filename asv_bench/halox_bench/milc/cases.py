"""Cases of the MILC benchmark: lattice, operator, precision, number of ranks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from math import prod
from typing import Any

from halox.errors import HaloxError
from halox_bench.common.exact import prime_factors

IMPROVED, NAIVE = "improved", "naive"
OPERATORS = (IMPROVED, NAIVE)
PRECISIONS = {"double": "c16", "single": "c8"}

STRONG, WEAK = "strong", "weak"
SCALINGS = (STRONG, WEAK)

LATTICES = {
    "gpu": ((32, 32, 32, 32), (36, 36, 36, 72), (18, 18, 18, 36)),
    "cpu": ((16, 16, 16, 16),),
}
"""Usual lattices: sites along x, y, z and t."""

QUICK_LATTICES = ((8, 8, 8, 8),)

DSLASH_FLOPS = {IMPROVED: 1146, NAIVE: 570}
"""Operations of D per site of the result, as MILC counts them."""

CG_FLOPS = {IMPROVED: 1187, NAIVE: 606}
"""Operations of an iteration for one parity per site of the lattice, likewise."""


@dataclass(frozen=True)
class MilcCase:
    """A lattice with an operator in a precision.

    Attributes
    ----------
    lattice : tuple of int
        Sites along x, y, z and t of all ranks together.
    operator : {"improved", "naive"}
    precision : {"double", "single"}
    ranks : int
        0 for all ranks.
    scaling : {"", "strong", "weak"}
        Table of the case.
    """

    lattice: tuple[int, int, int, int]
    operator: str = IMPROVED
    precision: str = "double"
    ranks: int = 0
    scaling: str = ""

    @property
    def details(self) -> dict[str, Any]:
        return dict(vars(self))

    @property
    def size(self) -> str:
        """Lattice by name."""
        return "x".join(map(str, self.lattice))

    @property
    def name(self) -> str:
        """Lattice, operator and precision."""
        return f"{self.size} {self.operator} {self.precision}"

    @property
    def volume(self) -> int:
        """Sites of both parities."""
        return prod(self.lattice)

    @property
    def distances(self) -> tuple[int, ...]:
        """Distances of neighbours."""
        return (1, 3) if self.operator == IMPROVED else (1,)

    @property
    def dtype(self) -> str:
        """Dtype of matrices and vectors."""
        return PRECISIONS[self.precision]


def cases(args: argparse.Namespace) -> list[MilcCase]:
    """Return all combinations of a command line's lattices, operators and precisions.

    Raises
    ------
    HaloxError
        If a lattice has not four axes of even numbers of sites.
    """
    usual = QUICK_LATTICES if args.quick else tuple(chain(*LATTICES.values()))
    found = []
    for lattice, operator, precision in product(
        args.lattices or usual, args.operators or OPERATORS, args.precisions or PRECISIONS
    ):
        if len(lattice) != 4 or any(n % 2 for n in lattice):
            raise HaloxError(
                f"--lattices {'x'.join(map(str, lattice))}: expected even numbers of sites along x, y, z and t, as in "
                "32x32x32x64"
            )
        x, y, z, t = lattice
        found.append(MilcCase((x, y, z, t), operator, precision))
    return found


def scaled(case: MilcCase, size: int, scalings: Sequence[str] = SCALINGS) -> list[MilcCase]:
    """Return a case on one rank, on all of ``size`` and on powers of two between, of one lattice and of growing ones.

    Examples
    --------
    >>> [(one.scaling, one.ranks, one.size) for one in scaled(MilcCase((8, 8, 8, 8)), 2)]
    [('strong', 1, '8x8x8x8'), ('strong', 2, '8x8x8x8'), ('weak', 2, '8x8x8x16')]
    """
    counts = sorted({size, *(1 << n for n in range(size.bit_length()))})
    found = [replace(case, ranks=n, scaling=STRONG) for n in counts if STRONG in scalings or n == 1]
    if WEAK in scalings:
        found += [
            replace(case, lattice=grown(case.lattice, n), ranks=n, scaling=WEAK)
            for n in counts
            if n > 1
        ]
    return found


def grown(lattice: tuple[int, int, int, int], ranks: int) -> tuple[int, int, int, int]:
    """Return a lattice of ``ranks`` times the sites: prime factors go to t, z, y and x in turn.

    Examples
    --------
    >>> grown((8, 8, 8, 8), 12)
    (8, 16, 16, 24)
    """
    sites = list(lattice)
    for number, prime in enumerate(prime_factors(ranks)):
        sites[3 - number % 4] *= prime
    x, y, z, t = sites
    return x, y, z, t
