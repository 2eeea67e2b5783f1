"""A benchmark stage with graphs, without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from halox.errors import StateError
from halox_bench.ranks.clock import Stage


class Capturing(Stage):
    """Stage of NumPy arrays that captures graphs: a replay makes the captured calls again."""

    def __init__(self) -> None:
        super().__init__()
        self.device = 0
        self.spoil: np.ndarray | None = None
        self.refuse = ""

    def settle(self) -> None:
        pass

    def captured(self, call: Callable[[], None], calls: int) -> Callable[[], None]:
        if self.refuse:
            raise StateError(self.refuse)

        def replay() -> None:
            for _ in range(calls):
                call()
            if self.spoil is not None:
                self.spoil[(0,) * self.spoil.ndim] += 1

        return replay
