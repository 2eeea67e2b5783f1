"""Launches that pack or unpack messages fragment by fragment, one launch a fragment for all messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from halox.packing.cutting import cut_parts
from halox.packing.device import Launches
from halox.packing.endpoint import Endpoint
from halox.packing.refine import Copy
from halox.packing.strided import StridedCopy
from halox.packing.workunits import WorkUnitsCopy

if TYPE_CHECKING:
    from halox.datatypes import Datatype

FragmentedMove = tuple[Endpoint, int, Sequence[int]]
"""An endpoint, the address of its packed bytes, and where its share of each fragment ends, counted from there."""


def fragment_launches(
    moves: Sequence[FragmentedMove], fragments: int, device: int, *, unpack: bool
) -> list[Launches]:
    """Return the launches of each fragment: one for strided endpoints, and one for irregular ones.

    Parameters
    ----------
    moves : sequence of FragmentedMove
        Each with as many ends as there are fragments.
    fragments : int
    device : int
        The GPU that runs the kernels.
    unpack : bool

    Notes
    -----
    Not collective; uploads tables and waits for that.
    """
    copies: list[list[Copy]] = [[] for _ in range(fragments)]
    irregular: list[list[tuple[Datatype, int, int, int]]] = [[] for _ in range(fragments)]
    for (found, datatype, count), packed, ends in moves:
        parts = cut_parts(found.pointer, datatype, count, packed, ends, unpack=unpack)
        if isinstance(parts, int):
            irregular[parts].append((datatype, count, found.pointer, packed))
            continue
        for fragment, of_it in zip(copies, parts, strict=True):
            fragment += of_it
    launches = []
    for strided, others in zip(copies, irregular, strict=True):
        made: list[Any] = [StridedCopy(strided, device=device)] if strided else []
        if others:
            made.append(WorkUnitsCopy(others, unpack=unpack, device=device))
        launches.append(Launches(made))
    return launches
