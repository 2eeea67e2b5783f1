"""Loops of steps until a flag: on a GPU by a graph that repeats itself, without the host; else by plain calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from halox.errors import DeviceError, FieldError, HaloxError, MismatchError, StateError, raising
from halox.runtime.arrays import Described, describe
from halox.runtime.call_guard import Unique
from halox.runtime.context import Context
from halox.values import as_int, shown

_CALL = "loop"
_REMEDY = "compute the flag from the same bits on all ranks, as from a result of grid.norm"


class Loop(Unique):
    """Steps that repeat until a flag is set: ``steps = loop()``; made by `Grid.loop`.

    Attributes
    ----------
    why_host : str
        Why the host calls the steps; empty if the GPU repeats them. Known after a call of several rounds.
    """

    def __init__(
        self,
        context: Context,
        device: int | None,
        step: Any,
        until: Any,
        most: object,
        every: object,
    ) -> None:
        def check() -> tuple[tuple[int, int], dict[str, int]]:
            if not callable(step):
                raise HaloxError(f"step must be a function without arguments, got {shown(step)}")
            self._flag = _check_flag(until, device)
            steps, round_steps = _check_count("most", most), _check_count("every", every)
            if rest := steps % round_steps:
                raise HaloxError(
                    f"most={steps} is not a multiple of every={round_steps}, the steps between two looks at the flag; "
                    f"give most={steps - rest + round_steps}"
                )
            return (steps, round_steps), {"most": steps, "every": round_steps}

        world = context.world
        with world.guard:
            world.begin(_CALL)
            self._most, self._every = world.attempt(check, _CALL, alike=True)
        self._context, self._world, self._device = context, world, device
        self._step, self._until = step, until
        self._graph: Any = None
        self.why_host = "" if device is not None else "the grid has NumPy arrays"

    def __call__(self) -> int:
        """Run steps until the flag is set or the most steps are made; return their number, the same on all ranks.

        Raises
        ------
        StateError
            On all ranks, if a CUDA graph cannot contain the steps; if the current stream is being captured.
        ExchangeTimeoutError
            If a rank does not make its steps within ``HALOX_TIMEOUT`` seconds.
        MismatchError
            On all ranks, if flags differ, so that ranks end after different numbers of steps.

        Notes
        -----
        Collective. Blocks; while a GPU repeats the steps, on the current stream, the host sleeps. An interrupt (Ctrl-C)
        ends the step, or, if the GPU repeats it, the loop on this rank after the present round of ``every`` steps.
        """
        self._world.check_open()
        if self._device is not None:
            from halox.runtime.gpu.streams import is_capturing

            if is_capturing():
                raise StateError("the current stream is being captured; end the capture first")
        made, is_over = 0, False
        if self._graph is None and not self.why_host:
            # The first round compiles kernels and makes plans, which is impossible in a capture.
            made = self._call_steps(0, self._every)
            is_over = made == self._most or bool(self._until)
            self._agree(made, is_over, None if is_over else self._capture)
        if not is_over:
            made = self._run_graph(made) if self._graph else self._call_steps(made, self._most)
        self._agree(made, True)
        return made

    def _call_steps(self, made: int, most: int) -> int:
        """Call the step until the flag is set or ``most`` steps are made; return their number."""
        while made < most:
            try:
                self._round()
            except Exception as error:
                self._tell(error)
                raise
            made += self._every
            if self._until:
                break
        return made

    def _round(self) -> None:
        for _ in range(self._every):
            self._step()

    def _tell(self, error: Exception) -> None:
        """Raise an error of this rank's step on the ranks that wait for it, in this call or in one of the step."""
        is_common = isinstance(error, MismatchError)
        if not (is_common or self._world.closed or self._world.failed):
            with suppress(HaloxError), self._world.guard:
                self._world.begin(_CALL)
                self._world.attempt(raising(error), _CALL)

    def _agree(self, made: int, is_over: bool, prepare: Callable[[], str] | None = None) -> None:
        """Compare the ranks, and note the reason from ``prepare`` why the host calls the steps; collective."""
        state = {"the number of steps": made, "the end of the loop": is_over}

        def mine() -> tuple[None, tuple[dict[str, int], str]]:
            return None, (state, "" if prepare is None else prepare())

        with self._world.guard:
            self._world.begin(_CALL)
            try:
                _, records = self._world.gather(mine, _CALL)
                states, reasons = zip(*records.distinct, strict=True)
                self._world.check_alike(states, remedies=dict.fromkeys(state, _REMEDY))
            except HaloxError:
                self._graph = None  # also if only another rank has none
                raise
        if why := next(filter(None, reasons), ""):
            self._graph, self.why_host = None, why

    def _capture(self) -> str:
        """Capture a round; return the reason if the host must call the steps."""
        from halox.runtime.gpu.while_graph import WhileGraph, has_while_graphs

        if not has_while_graphs():
            return "loops on a GPU need a driver and cuda.bindings of CUDA 12.4 or later"
        try:
            self._graph = WhileGraph(self._round, self._flag)
        except StateError as error:  # halox refuses to be captured, before anything is launched
            return str(error)
        except Exception as error:
            raise StateError(
                f"a CUDA graph cannot contain the steps of the loop ({type(error).__name__}: {error}); in a step "
                "nothing may wait for the GPU, as a conversion of an array to a number does; keep numbers in arrays"
            ) from error
        return ""

    def _run_graph(self, made: int) -> int:
        """Repeat the graph after some steps; return the number of all steps."""
        from halox.runtime.gpu.pools import count_failures

        before = count_failures()
        with self._world.guard:
            self._world.begin(_CALL)
            rounds: int = self._graph.run(
                made // self._every, self._most // self._every, lambda: count_failures() > before
            )
        if count_failures() > before:
            self._round()  # the call that has failed raises the error
            raise StateError("a call outside of the loop has failed on the GPU; call it to see why")
        return rounds * self._every


def _check_flag(until: Any, device: int | None) -> Described:
    """Describe the flag; raise an error unless it is one bool or integer on the device."""
    flag = describe(until, "until")
    if any(extent != 1 for extent in flag.shape) or flag.dtype.kind not in "bui":
        raise FieldError(
            f"until must be an array of one bool or integer, got {flag}; as grid.xp.zeros((), bool), which a step sets "
            "by grid.xp.less(..., out=until)"
        )
    if flag.device != device:
        found, needed = ("the host" if n is None else f"GPU {n}" for n in (flag.device, device))
        raise DeviceError(
            f"until is on {found}, and the fields of the grid on {needed}; allocate it there"
        )
    return flag


def _check_count(name: str, value: object) -> int:
    """Return a number of steps; raise `HaloxError` if it is invalid."""
    number = as_int(value)
    if number is None or not 1 <= number < 1 << 63:
        raise HaloxError(f"{name} must be an int >= 1, a number of steps, got {shown(value)}")
    return number
