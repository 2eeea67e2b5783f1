"""CRC32C of a chunk from partial checksums, when several ranks each read some of its bytes.

A CRC without its constants is linear: the CRC of a message is the sum (XOR) of the CRCs of its parts, each part
followed by zeros up to the end of the message. A multiplication modulo the polynomial appends zeros.

References
----------
W. W. Peterson and D. T. Brown, "Cyclic codes for error detection", Proc. IRE 49 (1961); ``crc32_combine`` of zlib.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from halox.runtime.arrays import Array
from halox.window import as_bytes

CRC_BYTES = 4

_POLYNOMIAL = 0x82F63B78
_ONES = 0xFFFFFFFF
_ONE = 1 << 31  # bits are reflected: the highest is the coefficient of x^0


class PartialChecksum:
    """Checksum of some bytes of a message, given in order; all other bytes count as zeros."""

    def __init__(self) -> None:
        from google_crc32c import extend

        self._extend: Any = extend
        self._value, self._end = 0, 0

    def add(self, part: Array, offset: int) -> None:
        """Add the bytes of a contiguous array, at an offset after all bytes added before."""
        value = zeros_behind(self._value, offset - self._end)
        self._value = self._extend(value ^ _ONES, as_bytes(part)) ^ _ONES
        self._end = offset + part.nbytes

    def of(self, nbytes: int) -> int:
        """Return the sum for a message of ``nbytes`` bytes; the sums of all its parts add up to `linear_part`."""
        return zeros_behind(self._value, nbytes - self._end)


def linear_part(checksum: int, nbytes: int) -> int:
    """Return the CRC32C of a message of ``nbytes`` bytes without its constants."""
    return checksum ^ _ONES ^ zeros_behind(_ONES, nbytes)


def zeros_behind(value: int, nbytes: int) -> int:
    """Return the linear part of a CRC for the same message followed by ``nbytes`` zero bytes.

    Examples
    --------
    >>> hex(zeros_behind(0x80000000, 4)), hex(zeros_behind(0x80000000, 0))
    ('0x82f63b78', '0x80000000')
    """
    if not nbytes or not value:
        return value
    first, second, third, fourth = _tables(nbytes)
    return (
        first[value & 255]
        ^ second[value >> 8 & 255]
        ^ third[value >> 16 & 255]
        ^ fourth[value >> 24]
    )


@lru_cache(maxsize=256)
def _tables(nbytes: int) -> tuple[list[int], ...]:
    """Return the products of x^(8 nbytes) with all values of each byte of a CRC."""
    row, rows = _power(nbytes), []
    for _ in range(32):  # times x^0, x^1, ..., of the bits from the highest on
        rows.append(row)
        row = _times_x(row)
    found = []
    for byte in range(4):
        table = [0]
        for bit in range(8):
            factor = rows[31 - 8 * byte - bit]
            table += [one ^ factor for one in table]
        found.append(table)
    return tuple(found)


def _power(nbytes: int) -> int:
    """Return x^(8 nbytes) modulo the polynomial."""
    found, square, rest = _ONE, _ONE >> 8, nbytes
    while rest:
        if rest & 1:
            found = _product(found, square)
        square, rest = _product(square, square), rest >> 1
    return found


def _product(one: int, other: int) -> int:
    found = 0
    while other:
        if other & _ONE:
            found ^= one
        one, other = _times_x(one), other << 1 & _ONES
    return found


def _times_x(value: int) -> int:
    return value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
