"""A case with its arrays and methods, made when a context is entered and released when it is left."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import ExitStack
from typing import Any, Self

import numpy as np

from halox_bench.ranks.bench import RanksBench
from halox_bench.ranks.methods import Methods, Row


class PreparedCase(Methods[Row]):
    """A case on the ranks: its arrays, and every method that gave the right result.

    Attributes
    ----------
    own_arrays : list of array
        Arrays of halox; ``arrays`` are those of users.
    """

    own_arrays: list[Any]

    def __init__(self, bench: RanksBench[Any], case: Any, graph_calls: int) -> None:
        super().__init__(bench, [], graph_calls)
        self.case = case

    def __enter__(self) -> Self:
        """Make everything."""
        with ExitStack() as stack:
            self.enter(stack)
            stack.push(self._leave)
            stack.enter_context(self.stage.current())
            self.arrays = self.own_arrays
            if self.stage.device is None:
                # Users have NumPy's own arrays, not halox's shared memory, which slows MPI down.
                self.arrays = [np.empty(array.shape, array.dtype) for array in self.own_arrays]
            self.make_oracle()
            self.stage.settle()
            self.make()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        """Release everything, unless an exception propagates: other ranks may not take part then."""
        self._stack.__exit__(*error)

    @abstractmethod
    def enter(self, stack: ExitStack) -> None:
        """Make ``own_arrays``; what must be closed goes to the stack."""

    @abstractmethod
    def make_oracle(self) -> None:
        """Make what `check` compares results with."""

    def _leave(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        self.own_arrays, self.arrays = [], []
