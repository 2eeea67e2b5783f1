"""Exchange plans: messages and their paths, agreed with the peers, made once and used in every step.

`halo`, `transpose` and `typed` describe exchanges as drafts: arrays, and messages between the ranks. `making` turns the
ranks' drafts into plans: `selection` chooses a path for each message by the constants in `costs` (`calibration` reads
measured ones), and the paths make the channels that a `Plan` runs. `cache` keeps the plans of a grid.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NoReturn

from halox.errors import HaloxError


class _Package(ModuleType):
    """The type of this package, for the error of a call like ``halox.exchange(u)``."""

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `HaloxError`."""
        raise HaloxError(
            "halox.exchange is a package; call the method of a grid, as in grid = halox.Grid(shape); grid.exchange(u)"
        )


sys.modules[__name__].__class__ = _Package
