"""The endpoint of a move: an array with a datatype and its count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from halox.datatypes import Datatype


class Endpoint(NamedTuple):
    """An array, and a datatype with its count at the array's first element."""

    array: Any
    datatype: Datatype
    items: int
