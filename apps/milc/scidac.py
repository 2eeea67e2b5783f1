"""Fields in SciDAC files: one LIME record with all sites, x fastest, and records that describe it.

Every rank reads and writes only the sites of its own block. Numbers are big-endian complex64 or complex128. A file
contains checksums of all sites; `read` compares them.
"""

from __future__ import annotations

import math
import os
import re
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import halox

from ..common import on_all_ranks
from . import lime

_BINARY = "scidac-binary-data"
_FILE, _RECORD, _CHECKSUM = (
    "scidac-private-file-xml",
    "scidac-private-record-xml",
    "scidac-checksum",
)
_XML = '<?xml version="1.0" encoding="UTF-8"?>'
_DTYPES: dict[str, np.dtype[Any]] = {"F": np.dtype(">c8"), "D": np.dtype(">c16")}


class SiteType(NamedTuple):
    """Contents of a site: a number of ``objects`` of ``shape``; ``name`` is part of the SciDAC type name."""

    name: str
    objects: int
    shape: tuple[int, ...]

    @property
    def site_shape(self) -> tuple[int, ...]:
        """Shape of the numbers of a site."""
        return (self.objects, *self.shape) if self.objects > 1 else self.shape

    @property
    def numbers(self) -> int:
        """Complex numbers of a site."""
        return self.objects * math.prod(self.shape)


LINKS = SiteType("ColorMatrix", 4, (3, 3))
VECTOR = SiteType("ColorVector", 1, (3,))


class Contents(NamedTuple):
    """Offset of the sites in a file, their dtype, and their checksums or None."""

    offset: int
    dtype: np.dtype[Any]
    checksums: tuple[int, int] | None


def contents(path: str, lattice: Sequence[int], site: SiteType) -> Contents:
    """Check the description of a field in a file, and return its offset, dtype and checksums; local.

    Parameters
    ----------
    path : str
    lattice : sequence of int
        Sites along t, z, y and x that the file must have.
    site : SiteType
        Contents that every site must have.

    Raises
    ------
    halox.errors.HaloxError
        If the file is not a LIME file, is truncated, or has another lattice, precision or site type.
    """
    found: dict[str, lime.Record] = {}
    for record in lime.records(path):
        found.setdefault(record.kind, record)
    if _BINARY not in found:
        raise halox.errors.HaloxError(
            f"{path} has no record {_BINARY!r}, only {', '.join(found)}; give a SciDAC file of a field"
        )
    text = {
        kind: _read_text(path, found[kind]) if kind in found else ""
        for kind in (_FILE, _RECORD, _CHECKSUM)
    }
    dims = _tag(text[_FILE], "dims").split()
    wanted = [str(n) for n in lattice[::-1]]
    if dims and dims != wanted:
        raise halox.errors.HaloxError(
            f"{path} holds a lattice of {' x '.join(dims)} sites, and --lattice is {' x '.join(wanted)}; "
            f"give --lattice {' '.join(dims)} or another file"
        )
    precision, size = _tag(text[_RECORD], "precision"), found[_BINARY].size
    volume = math.prod(lattice)
    sizes = {letter: volume * site.numbers * dtype.itemsize for letter, dtype in _DTYPES.items()}
    letter = precision or next((key for key, n in sizes.items() if n == size), "F")
    if letter not in _DTYPES:
        raise halox.errors.HaloxError(
            f"{path} has numbers of precision {letter!r}; convert it to single (F) or double (D)"
        )
    dtype = _DTYPES[letter]
    count, typesize = _tag(text[_RECORD], "datacount"), _tag(text[_RECORD], "typesize")
    bytes_each = math.prod(site.shape) * dtype.itemsize
    if (count or str(site.objects)) != str(site.objects) or (typesize or str(bytes_each)) != str(
        bytes_each
    ):
        raise halox.errors.HaloxError(
            f"{path} has {count} object(s) of {typesize} bytes a site ({_tag(text[_RECORD], 'datatype')}), and "
            f"{site.objects} {site.name} of {bytes_each} bytes in precision {letter} is expected; give a file of "
            f"{'the four links' if site is LINKS else 'a colour vector'} of every site"
        )
    if size != sizes[letter]:
        raise halox.errors.HaloxError(
            f"{path} has {size} bytes of sites, and {sizes[letter]} are expected: {' x '.join(wanted)} sites of "
            f"{site.numbers} complex numbers in precision {letter}; give a file of this lattice, site type and "
            "precision"
        )
    sums = _tag(text[_CHECKSUM], "suma"), _tag(text[_CHECKSUM], "sumb")
    checksums = (int(sums[0], 16), int(sums[1], 16)) if all(sums) else None
    return Contents(found[_BINARY].offset, dtype, checksums)


def read(path: str, grid: halox.Grid, site: SiteType) -> np.ndarray:
    """Return this rank's block of a field, ``(t, z, y, x)`` and the numbers of a site, complex128.

    Parameters
    ----------
    path : str
    grid : halox.Grid
        The whole lattice along t, z, y and x.
    site : SiteType

    Raises
    ------
    halox.errors.HaloxError
        As for `contents`, and if the checksums of sites and file differ; on all ranks.

    Notes
    -----
    Collective.
    """

    def mine() -> tuple[np.ndarray, Contents]:
        found = contents(path, grid.grid_shape, site)
        file = np.memmap(path, found.dtype, "r", found.offset, (*grid.grid_shape, *site.site_shape))
        return np.ascontiguousarray(file[grid.owned]), found

    block, found = on_all_ranks(grid.comm, mine, f"reading {path}")
    sums = checksums(block, grid)
    if found.checksums not in (None, sums):
        raise halox.errors.HaloxError(
            f"{path} is damaged: its sites have the checksums {sums[0]:x} and {sums[1]:x}, and the file says "
            f"{found.checksums[0]:x} and {found.checksums[1]:x}; copy it again"
        )
    return block.astype(np.complex128)


def write(path: str, block: np.ndarray, grid: halox.Grid, site: SiteType, title: str) -> None:
    """Write a field in the precision of ``block``, complex64 or complex128; for parameters see `read`.

    Raises
    ------
    halox.errors.HaloxError
        If a rank cannot write; on all ranks.

    Notes
    -----
    Collective. Writes a file with ``.part`` appended to its name, and renames it when it is complete.
    """
    letter = {8: "F", 16: "D"}[block.dtype.itemsize]
    block = np.ascontiguousarray(block, _DTYPES[letter])
    size = math.prod(grid.grid_shape) * site.numbers * block.dtype.itemsize
    before, after = _records(grid, site, letter, size, title, checksums(block, grid))
    offset, part = len(before), f"{path}.part"

    def make() -> None:
        if grid.rank == 0:
            with open(part, "wb") as file:
                file.write(before)
                file.seek(offset + lime.padded(size))
                file.write(after)

    def fill() -> None:
        file = np.memmap(part, block.dtype, "r+", offset, (*grid.grid_shape, *site.site_shape))
        file[grid.owned] = block
        file.flush()

    def complete() -> None:
        if grid.rank == 0:
            os.replace(part, path)

    for step in (make, fill, complete):
        on_all_ranks(grid.comm, step, f"writing {path}")


def checksums(block: np.ndarray, grid: halox.Grid) -> tuple[int, int]:
    """Return SciDAC's two checksums of the sites of all ranks; ``block`` has the bytes of the file; collective.

    A checksum is the exclusive or of the CRC-32 of every site, rotated by the site's number modulo 29 or 31.
    """
    t, z, y, x = np.ix_(*(np.arange(part.start, part.stop) for part in grid.owned))
    _, nz, ny, nx = grid.grid_shape
    numbers = (x + nx * (y + ny * (z + nz * t))).ravel()
    sites = block.reshape(len(numbers), -1).view(np.uint8)
    crcs = np.fromiter((zlib.crc32(site.data) for site in sites), np.uint64, len(numbers))
    sums = []
    for modulus in (29, 31):
        shift = (numbers % modulus).astype(np.uint64)
        rotated = ((crcs << shift) | (crcs >> (np.uint64(32) - shift))) & np.uint64(0xFFFFFFFF)
        sums.append(int(np.bitwise_xor.reduce(rotated)))
    everyone = np.array(grid.comm.allgather(sums), np.uint64)
    first, second = np.bitwise_xor.reduce(everyone, axis=0).tolist()
    return first, second


def _records(
    grid: halox.Grid, site: SiteType, letter: str, size: int, title: str, sums: tuple[int, int]
) -> tuple[bytes, bytes]:
    """Return the bytes of a file before its sites, and the bytes after them."""
    dims = " ".join(map(str, grid.grid_shape[::-1]))
    each = math.prod(site.shape) * _DTYPES[letter].itemsize
    texts = (
        (
            _FILE,
            lime.FIRST,
            f"{_XML}<scidacFile><version>1.1</version><spacetime>4</spacetime><dims>{dims} </dims>"
            "<volfmt>0</volfmt></scidacFile>\0",
        ),
        ("scidac-file-xml", lime.LAST, f"{title}\0"),
        (
            _RECORD,
            lime.FIRST,
            f"{_XML}<scidacRecord><version>1.0</version><date></date><globaldata>0</globaldata>"
            f"<datatype>QDP_{letter}3_{site.name}</datatype><precision>{letter}</precision><colors>3</colors>"
            f"<typesize>{each}</typesize><datacount>{site.objects}</datacount></scidacRecord>\0",
        ),
        ("scidac-record-xml", 0, f"{title}\0"),
    )
    checksum = (
        f"{_XML}<scidacChecksum><version>1.0</version><suma>{sums[0]:x}</suma>"
        f"<sumb>{sums[1]:x}</sumb></scidacChecksum>\0"
    )
    before = b"".join(_record(*one) for one in texts) + lime.header(_BINARY, size)
    return before, _record(_CHECKSUM, lime.LAST, checksum)


def _record(kind: str, flags: int, text: str) -> bytes:
    payload = text.encode()
    return lime.header(kind, len(payload), flags) + payload.ljust(lime.padded(len(payload)), b"\0")


def _read_text(path: str, record: lime.Record) -> str:
    with open(path, "rb") as file:
        file.seek(record.offset)
        return file.read(record.size).decode("utf-8", "replace")


def _tag(text: str, name: str) -> str:
    """Return the text of an XML element, or an empty string."""
    found = re.search(rf"<{name}>([^<]*)</{name}>", text)
    return "" if found is None else found.group(1).strip()
