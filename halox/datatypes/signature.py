"""Type signatures: the sequence of primitives in a datatype, comparable in constant time.

Two ranks may describe a message by different datatypes if both datatypes list the same
primitives in the same order. A message can hold billions of primitives, so a signature does not
store the sequence. It stores the sequence's length and a polynomial hash, both computed from the
signatures of the datatype's parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

_PRIME = 2**127 - 1
_HEAD = 3  # number of first runs to keep, for messages


def _number(text: str) -> int:
    # Unlike hash(), equal in all processes and versions of Python.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest()) % _PRIME


_BASE = _number("halox signature base")
_SERIES = pow(_BASE - 1, -1, _PRIME)  # 1 + b + ... + b**(n-1) is (b**n - 1) times this


@dataclass(frozen=True, slots=True)
class Signature:
    """Digest of a sequence of primitive types, for comparing and printing sequences.

    Equal sequences have equal signatures. Two different sequences of length n have equal
    signatures with a probability of about n / 2**127. A signature is small, picklable, and the same
    in every process, so that ranks can exchange signatures.

    Parameters
    ----------
    elements : int
        Number of primitives.
    digest : int
        Polynomial hash of the sequence, modulo 2**127 - 1.
    n_runs : int
        Number of maximal runs of equal primitives.
    head : tuple of (str, int)
        The first runs (at most three): NumPy type string, repetitions.
    last : str
        Type string of the last primitive; empty for an empty sequence.
    power : int
        The hash's base to the power ``elements``; stored to save time.

    Notes
    -----
    Let ``P`` be the prime and ``b`` the base. The sequence ``s[0] .. s[n-1]`` has the digest
    ``sum(h(s[i]) * b**(n-1-i)) mod P``. So the digest of ``x + y`` is
    ``digest(x) * b**len(y) + digest(y)``, and repetition by doubling takes O(log count) steps.

    Examples
    --------
    >>> double, short = Signature.of("<f8"), Signature.of("<i2")
    >>> print((double + short * 2) * 2)
    f8 x 1, i2 x 2, f8 x 1, ... (3 of 4 runs)
    >>> (double + double) * 3 == double * 6
    True
    >>> double + short == short + double
    False
    """

    elements: int = 0
    digest: int = 0
    n_runs: int = field(default=0, compare=False)
    head: tuple[tuple[str, int], ...] = field(default=(), compare=False)
    last: str = field(default="", compare=False)
    power: int = field(default=1, compare=False, repr=False)

    @staticmethod
    @lru_cache(maxsize=256)
    def of(code: str) -> Signature:
        """Signature of one primitive, given by its NumPy type string such as ``"<f8"``."""
        return Signature(1, _number(code), 1, ((code, 1),), code, _BASE)

    @staticmethod
    def concatenated(parts: Iterable[Signature]) -> Signature:
        """Signature of several sequences one after another."""
        whole = Signature()
        for part in parts:
            whole = whole + part
        return whole

    def __reduce__(self) -> tuple[type[Signature], tuple[object, ...]]:
        """Pickle the fields alone, because plans send many signatures."""
        fields = (self.elements, self.digest, self.n_runs, self.head, self.last, self.power)
        return Signature, fields

    def __add__(self, other: Signature) -> Signature:
        if not self.elements:
            return other
        if not other.elements:
            return self
        joined = int(self.last == other.head[0][0])
        return Signature(
            self.elements + other.elements,
            (self.digest * other.power + other.digest) % _PRIME,
            self.n_runs + other.n_runs - joined,
            self._head_before(other, joined),
            other.last,
            self.power * other.power % _PRIME,
        )

    def __mul__(self, count: int) -> Signature:
        if count == 1:
            return self
        if (
            self.n_runs == 1 and count > 0
        ):  # The digest is a geometric series. This case is common, so it should be fast.
            elements = self.elements * count
            power = pow(_BASE, elements, _PRIME)
            digest = Signature.of(self.last).digest * (power - 1) * _SERIES % _PRIME
            return Signature(elements, digest, 1, ((self.last, elements),), self.last, power)
        whole, doubled = Signature(), self
        while count:
            if count & 1:
                whole = whole + doubled
            count >>= 1
            if count:
                doubled = doubled + doubled
        return whole

    def _head_before(self, other: Signature, joined: int) -> tuple[tuple[str, int], ...]:
        if self.n_runs > len(self.head):
            return self.head
        if not joined:
            return (self.head + other.head)[:_HEAD]
        code, repetitions = self.head[-1]
        run = (code, repetitions + other.head[0][1])
        return (*self.head[:-1], run, *other.head[1:])[:_HEAD]

    @property
    def uniform(self) -> np.dtype | None:
        """The primitives' dtype if all primitives are equal, else None."""
        return np.dtype(self.last) if self.n_runs == 1 else None

    def __str__(self) -> str:
        """Short text with the first runs, for example ``f8 x 4096``."""
        if not self.elements:
            return "empty"
        text = ", ".join(f"{_readable(code)} x {count}" for code, count in self.head)
        if self.n_runs > len(self.head):
            text += f", ... ({len(self.head)} of {self.n_runs} runs)"
        return text


def _readable(code: str) -> str:
    return code[1:] if code[0] in "<|" else code
