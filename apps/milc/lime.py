"""LIME files: a sequence of records with a header of 144 bytes and a payload that is padded to 8 bytes.

A header is big-endian: the magic number, the version (16 bits), flags (16 bits) for the first and the last record of a
message, the bytes of the payload (64 bits), and from byte 16 on the type of the record as text.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

import halox

MAGIC = 0x456789AB
HEADER_BYTES = 144
FIRST, LAST = 0x8000, 0x4000
"""Flags: a record begins or ends a message."""

_PREFIX = struct.Struct(">IHHQ")
_ALIGNMENT = 8


class Record(NamedTuple):
    """Place of a record's payload in a file: its type, first byte and bytes."""

    kind: str
    offset: int
    size: int


def records(path: str | os.PathLike[str]) -> list[Record]:
    """Return the records of a file in order; reads only the headers.

    Raises
    ------
    halox.errors.HaloxError
        If the file cannot be read, is not a LIME file, or ends before its last record does.
    """
    found: list[Record] = []
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            at = 0
            while at < size:
                file.seek(at)
                header = file.read(HEADER_BYTES)
                if header[:4] != struct.pack(">I", MAGIC):
                    raise halox.errors.HaloxError(
                        f"{path} is not a LIME file: byte {at} begins with {header[:4].hex() or 'nothing'} "
                        f"instead of {MAGIC:x}; give a SciDAC file as MILC and QIO write it"
                    )
                if len(header) < HEADER_BYTES:
                    raise truncated(path, size, at + HEADER_BYTES)
                length = _PREFIX.unpack_from(header)[3]
                kind = header[_PREFIX.size :].split(b"\0", 1)[0].decode("ascii", "replace")
                found.append(Record(kind, at + HEADER_BYTES, length))
                if at + HEADER_BYTES + length > size:
                    raise truncated(path, size, at + HEADER_BYTES + length, kind)
                at += HEADER_BYTES + padded(length)
    except OSError as error:
        raise halox.errors.HaloxError(
            f"{path} cannot be read ({error.strerror}); give a file that every rank can read"
        ) from error
    if not found:
        raise halox.errors.HaloxError(f"{path} is not a LIME file: it is empty; give a SciDAC file")
    return found


def truncated(
    path: str | os.PathLike[str], size: int, needed: int, kind: str = ""
) -> halox.errors.HaloxError:
    """Return the error about a file that is too short."""
    record = f"record {kind!r}" if kind else "a record's header"
    return halox.errors.HaloxError(
        f"{path} is truncated: {record} ends at byte {needed}, and the file has {size} bytes; copy it again"
    )


def header(kind: str, size: int, flags: int = 0) -> bytes:
    """Return the header of a record.

    Examples
    --------
    >>> header("scidac-file-xml", 437, LAST)[:24].hex(" ", 4)
    '456789ab 00014000 00000000 000001b5 73636964 61632d66'
    """
    name = kind.encode("ascii")
    return _PREFIX.pack(MAGIC, 1, flags, size) + name.ljust(HEADER_BYTES - _PREFIX.size, b"\0")


def padded(size: int) -> int:
    """Return the bytes of a payload with its padding.

    Examples
    --------
    >>> padded(437), padded(440)
    (440, 440)
    """
    return -(-size // _ALIGNMENT) * _ALIGNMENT
