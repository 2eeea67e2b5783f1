"""The pictures of the documentation that are computed by scripts beside them."""

from __future__ import annotations

import importlib.util
from itertools import product
from pathlib import Path
from typing import Any

from tests import support

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, IMAGES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_a_checkerboarded_face() -> None:
    """Even sites outside the block at a distance of 1 or 3 from an odd site in it."""
    support.require("mpi")
    owned, halo = script("checkerboard").even_sites()
    block = set(product(range(8), range(8)))
    assert owned == {site for site in block if sum(site) % 2 == 0}
    read = {
        there
        for y, x in block - owned
        for d in (-3, -1, 1, 3)
        for there in ((y + d, x), (y, x + d))
    }
    assert halo == read - block
