"""Reductions of a grid on the host: combined in the order of the ranks, the same bits on every rank.

Every call compares dtypes and layouts of the ranks, along with their errors, so that all ranks raise together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np

from halox.domain import Domain
from halox.errors import FieldError, HaloxError, as_halox_error, raising
from halox.reductions.cells import Cells, Profile, cells_of
from halox.reductions.expressions import Request, returning, typed
from halox.reductions.field_operations import find_field_operation
from halox.reductions.host.host_allreduce import DOING as _COMBINING
from halox.reductions.host.host_allreduce import HostAllreduce
from halox.reductions.host.host_programs import Blocks, FieldProgram, Program, Values
from halox.reductions.operations import QUIET, check_out, find_operation
from halox.reductions.prepared import MOST_ARRAYS, Launch, PreparedReductions, Signature
from halox.runtime.arrays import Array, as_ndarray, describe
from halox.runtime.gathered_values import GatheredValues
from halox.runtime.gpu.devices import array_module, to_host
from halox.runtime.world import World
from halox.values import shortened, shown

_REDUCING = "a reduction"

MOST_FIELDS = 256
"""Most reductions of fields that a grid keeps on the host."""


class HostReduction:
    """A program over cells, the operations of its results, and the ranks; the constructor is local."""

    def __init__(self, world: World, program: Program) -> None:
        self._world, self._program, self.results = world, program, program.results
        record, count = self.results[0].record, self.results[0].count
        self._parts: list[tuple[Values, slice]] = []  # of a record of several results, in bytes
        if len(self.results) > 1:
            sizes = [values.count * values.record.itemsize for values in self.results]
            starts = np.cumsum([0, *sizes]).tolist()
            slices = [slice(*ends) for ends in pairwise(starts)]
            self._parts = list(zip(self.results, slices, strict=True))
            record, count = np.dtype("u1"), starts[-1]
        values = GatheredValues(world, program.meaning, record, (count,), self._join)
        self._gather = values.gather
        self._quietly = QUIET.copy().run

    def __call__(
        self, views: Sequence[Array], scalars: Sequence[Array], outs: Sequence[Any]
    ) -> Sequence[Any]:
        """Return ``outs``, or NumPy scalars: the same bits on every rank.

        Combining the ranks' values raises no floating-point errors, for any `numpy.errstate`: the result is then
        infinite or NaN, on all ranks.
        """
        try:
            mine = self._program.of_cells(views, scalars)
        except Exception as caught:
            self.refuse(as_halox_error(caught, _REDUCING))
        values = self._gather(self._record(mine) if self._parts else mine[0], _REDUCING)
        if values is None:
            shown = self._program.shown
            self._world.attempt(lambda: (None, {"the field reduced": shown}), _REDUCING, alike=True)
            raise AssertionError("ranks have met with fields of two kinds, and then of one")
        results: list[Any] = self._quietly(self._of_ranks, values.each)
        if not outs:
            return results
        for number, out in enumerate(outs):
            as_ndarray(out)[...] = results[number]
        return outs

    def _record(self, mine: Sequence[Any]) -> Any:
        """Return this rank's record, for its records of several results."""
        each = [
            np.asarray(value, values.record).tobytes()
            for value, (values, _) in zip(mine, self._parts, strict=True)
        ]
        return np.frombuffer(b"".join(each), "u1")

    def _of_ranks(self, records: Sequence[Array]) -> list[Any]:
        if not self._parts:
            return [self.results[0].of_ranks(records)]
        return [
            values.of_ranks([record[part].view(values.record) for record in records])
            for values, part in self._parts
        ]

    @np.errstate(all="ignore")
    def _join(self, total: Array, other: Array) -> None:
        if not self._parts:
            self.results[0].join(total, other)
        for values, part in self._parts:
            values.join(total[part].view(values.record), other[part].view(values.record))

    def bind(
        self,
        name: str,
        fields: Sequence[tuple[int, Cells]],
        count: int,
        scalars_of: Callable[[Sequence[Any]], Sequence[Array]] | None,
        returned: Callable[[Sequence[Any]], Any],
    ) -> Launch | None:
        """Prepare calls with these fields, each with its place among the arguments; None for other libraries' arrays.

        The first ``count`` arguments of a launch are fields and scalars, the others are arrays for the results.
        """
        if not all(type(cells.field) is np.ndarray for _, cells in fields):
            return None
        world, run = self._world, self.__call__
        places = [
            (place, cells.layout.interior, cells.view_of if isinstance(cells, Profile) else None)
            for place, cells in fields
        ]

        def launch(arguments: Sequence[Any]) -> Any:
            views = []
            for at, interior, of_profile in places:
                given = arguments[at]
                views.append(given[interior] if of_profile is None else of_profile(given[1]))
            with world.guard:
                world.begin(name)
                scalars: Sequence[Array] = ()
                if scalars_of is not None:
                    try:
                        scalars = scalars_of(arguments)
                    except FieldError as error:
                        self.refuse(error)
                return returned(run(views, scalars, arguments[count:]))

        return launch

    def refuse(self, error: Exception) -> None:
        """Raise an error on all ranks."""
        self._world.attempt(raising(error), _REDUCING)

    def close(self) -> None:
        """Do nothing: this object holds no memory."""


class HostArrays:
    """A grid's reductions of arrays on the host, and the cache of all its reductions."""

    fields: PreparedReductions[Any]

    def __init__(self, domain: Domain) -> None:
        self._domain, self._context = domain, domain.context
        self._world, self._device = domain.world, domain.device_id
        self._find_layout = domain.layouts.find_cells
        # Of texts with numbers in them; on the host, closing a reduction is local.
        self.fields = PreparedReductions(MOST_FIELDS if domain.device_id is None else None)
        self.arrays: PreparedReductions[Any] = PreparedReductions(MOST_ARRAYS)
        # The latest operation, whether it was exact, and its launch, which returns None for arrays of another dtype or
        # shape.
        self._latest: tuple[object, bool, Callable[[Any, Any], Any]] = None, False, lambda *_: None

    def array(self, op: str, array: Any, out: object, is_exact: bool) -> object:
        """Combine an array of each rank, element by element; collective, blocks."""
        latest, was_exact, launch = self._latest
        if op is latest and is_exact is was_exact and not self._world.closed:
            result = launch(array, out)
            if result is not None:
                return result
        known = self.arrays.reductions
        if type(array) is np.ndarray and type(op) is str:
            found = known.get(("cpu", op, is_exact, array.dtype, array.shape))
            if found is not None and not self._world.closed:
                self._latest = op, is_exact, found.launch
                result = found.launch(array, out)
                if result is not None:
                    return result
        with self._world.guard:
            self._world.begin("allreduce", op)
            try:
                host = array if type(array) is np.ndarray else _values(array)
                signature = "cpu", op, is_exact, host.dtype, host.shape
                reduction: Any = known.get(signature) if isinstance(op, str) else None
                is_new = reduction is None
                if is_new:
                    what = host.shape, host.dtype, find_operation(op, host.dtype, is_exact)
                    reduction = HostAllreduce(self._context, *what, compares=True)
            except Exception as caught:
                self._world.attempt(raising(as_halox_error(caught, _COMBINING)), _COMBINING)
            result = reduction(host, out)
            if is_new:  # on all ranks, since the call has compared the signature
                self.arrays.add(signature, reduction)  # may close the latest one
                self._latest = op, is_exact, reduction.launch
        if out is not None or isinstance(array, np.ndarray):
            return result
        return result[()] if np.isscalar(array) else array_module(self._device).asarray(result)

    def refuse(self, name: str, error: HaloxError) -> NoReturn:
        """Raise the error of a call's argument, on all ranks if the host takes part; collective."""
        with self._world.guard:
            self._world.begin(name)
            self._world.attempt(raising(error), _REDUCING)
        raise error

    def close(self) -> None:
        """Free the reductions' memory and communicators; collective."""
        self.fields.close()
        self.arrays.close()


class HostReductions(HostArrays):
    """A grid's reductions on the host."""

    fields: PreparedReductions[HostReduction]

    def field(
        self, name: str, fields: tuple[object, ...], out: object, is_exact: bool, key: Hashable
    ) -> object:
        """Reduce fields to one value; collective, blocks."""
        outs = () if out is None else (out,)
        with self._world.guard:
            self._world.begin(name)
            try:
                cells = cells_of(name, fields, self._find_layout)
                # Equal layouts are one object, which lives as long as its reduction.
                layout = cells[0].layout
                dtypes = tuple([each.dtype for each in cells])
                operation, dtype = find_field_operation(name, dtypes, is_exact)
                reduction = self._found(
                    (name, operation.is_exact, *dtypes, id(layout)),
                    lambda: FieldProgram(operation, dtypes, dtype, layout),
                    outs,
                )
                views = [each.view() for each in cells]
            except Exception as error:
                self._world.attempt(raising(as_halox_error(error, _REDUCING)), _REDUCING)
                raise
            result = reduction(views, (), outs)[0]

        def bind() -> Launch | None:
            return reduction.bind(name, [*enumerate(cells)], len(cells), None, returning(None))

        self.fields.prepare(key, fields, out, bind)
        return result

    def expressions(self, request: Request, key: Hashable) -> Any:
        """Reduce expressions of fields, each to one value; collective, blocks."""
        with self._world.guard:
            self._world.begin(request.call)
            try:
                call = typed(request, self._domain)
                scalars = call.program.values(request.named)
                signature = *request.title, call.meaning
                reduction = self._found(signature, lambda: Blocks(call), request.outs)
                views = [each.view() for each in call.cells]
            except Exception as error:
                self._world.attempt(raising(as_halox_error(error, _REDUCING)), _REDUCING)
                raise
            results = reduction(views, scalars, request.outs)

        def bind() -> Launch | None:
            names, program = tuple(request.named), call.program
            places = [names.index(name) for name in call.names]
            return reduction.bind(
                request.call,
                [*zip(places, call.cells, strict=True)],
                len(names),
                lambda arguments: program.values(dict(zip(names, arguments, strict=False))),
                returning(request.keys),
            )

        self.fields.prepare(key, request.arrays(), None, bind)
        return returning(request.keys)(results)

    def _found(
        self, signature: Signature, program: Callable[[], Program], outs: Sequence[object]
    ) -> HostReduction:
        """Return the reduction with a signature, and check that its results fit ``outs``; local."""
        reduction = self.fields.reductions.get(signature)
        if reduction is None:
            reduction = self.fields.add(signature, HostReduction(self._world, program()))
        for out, values in zip(outs, reduction.results, strict=bool(outs)):
            check_out(describe(out, "out"), values.dtype)
        return reduction


def _values(array: object) -> Array:
    """Return an array or a number as a NumPy array."""
    try:
        return to_host(array)
    except HaloxError:
        raise
    except Exception as error:  # NumPy raises several types
        raise FieldError(
            f"array: {shown(array)} is neither an array nor a number ({shortened(str(error))})"
        ) from error
