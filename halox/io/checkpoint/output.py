"""`Output`: records of fields in time, appended to a Zarr group while the program computes.

A call of `append` copies the cells and starts their write; TensorStore's threads compress and write. No thread makes
MPI calls: the next collective call of the output compares how far the ranks are. If all ranks have written a record,
rank 0 counts it in the group's metadata. A timer does so, at most every `COUNT_S`, for all records since::

    append 0    copy 0, start writing 0
    append 1    all have written 0: start the timer    copy 1, start writing 1
    timer       write the time of 0, count it
    wait        all have written 1: write the time of 1, count it
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from halox.decomposition import FieldLayout
from halox.domain.domain import HasDomain, domain_of
from halox.errors import CheckpointError, ClosedError, FieldError
from halox.io.checkpoint import arguments, records
from halox.io.checkpoint.arguments import CallerField
from halox.io.checkpoint.calls import SaveOptions, compared, request_of
from halox.io.checkpoint.chunks import ShardGrid
from halox.io.checkpoint.dates import Time, time_of
from halox.io.checkpoint.fields import StoredField
from halox.io.checkpoint.folder import METADATA, Lock, Replacement, remove
from halox.io.checkpoint.moving import Failure, collect, start_write
from halox.io.checkpoint.saving import as_checkpoint_error, checked, may_replace
from halox.io.checkpoint.series import Accumulator, Series, series_of
from halox.io.checkpoint.store import Store, arrays_of, is_output, load_tensorstore, make
from halox.io.regions import Cut, owned_cells
from halox.runtime.arrays import Array
from halox.runtime.call_guard import Closing, single_threaded
from halox.values import rounded_up, shown

_MAKING, _APPENDING, _WAITING = "making an Output", "append", "wait"
_MODES = ("w-", "w", "a")
COUNT_S = 0.05
"""Seconds until complete records count: two small files for many small records."""

_ENDLESS = 1 << 40
"""Length of the time axis for writing: the stored length counts complete records only."""


_Checked = TypeVar("_Checked")


class _Request(NamedTuple):
    path: Path
    fields: dict[str, CallerField]
    tables: dict[str, Any]
    series: dict[str, Series]
    regions: dict[str, Cut]
    metadata: dict[str, Any]  # of an output without records
    coords: dict[str, Array]
    given: frozenset[str]  # names of coordinates that the caller has given
    mode: str
    until: Time | None
    buffer: int


class _Variable(NamedTuple):
    field: StoredField
    shards: ShardGrid
    series: Series
    array: Any  # of TensorStore

    def cells(self, given: CallerField) -> Any:
        """Return this rank's cells of the region."""
        return owned_cells(given.array, given.layout)[self.shards.own_cells]


class _Record(NamedTuple):
    futures: list[Any]  # of TensorStore
    memory: list[Array]


class Output(Closing):
    """Records of fields in time: one Zarr group with a ``time`` axis, written in the background.

    Parameters
    ----------
    grid : Grid
        The grid of the fields.
    path : str or path
        A path on a file system that all ranks share.
    fields : mapping of str to array or Particles, optional
        Fields by name, with any dtypes and layouts; or by keyword, as in ``u=u``. Of `Particles`, each record has all
        attributes of all particles of its moment.
    mode : {"w-", "w", "a"}
        "w-" makes a new output, and raises an error if the path exists. "w" replaces an output or a checkpoint. "a"
        continues an output, on any number of ranks, or makes a new one if the path does not exist. The output keeps its
        attributes and compressors, whatever is given, and its coordinates, which must be the given ones.
    time : float or date, optional
        With "a", the time from which the program continues: later records are removed. By default none is removed.
    every : mapping of str to int, optional
        Fields or particles that are stored less often: ``{"u": 4}`` stores "u" in the first record and every fourth
        from there. Its time axis is called "time_4".
    mean, min, max : sequence of str, optional
        Fields whose mean, minimum or maximum over windows is stored, and not their records. ``every`` has the records
        of a window: ``mean=["u"], every={"u": 24}`` stores "u_mean" along the axis "time_window_24". Integers are
        stored as float64. If a run ends inside a window, or continues there, the values of the window are lost.
    keepbits : mapping of str to int, optional
        Fields whose mantissas are rounded to so many bits, so that ``compressors`` need fewer bytes; "p.v" is the
        attribute "v" of particles "p".
    region : sequence of slice, or mapping of str to such sequences, optional
        The part of the fields to store: a slice of global indices per grid axis. With a step, every n-th point is
        stored. Dimensions that the region of a single field cuts are called "x_u" for a field "u".
    dims, coords, attrs, compressors
        The same as for `Grid.save`. Dimensions cut by ``region`` have global indices as coordinates by default.
    buffer : int
        Number of records that a rank may have in memory, not yet written. If there are more, `append` waits.
    **named
        Further fields.

    Attributes
    ----------
    records : int
        Number of complete records. Readers see them a moment later, or at once after `wait`.

    Raises
    ------
    FieldError
        If a field does not fit the grid, or an argument is malformed; in `append`, if ``time`` does not increase, or an
        array has another dtype or layout than the field.
    MismatchError
        If arguments differ between ranks.
    CheckpointError
        If the output cannot be made: no permission, no space, another run is writing it, the path exists (with "w-"),
        is not an output or checkpoint, or is an output of another grid, or with other fields or coordinates (with "a").
        In methods: if a record could not be written, on any rank. The output then accepts no further records; it has
        all records that were complete.
    ClosedError
        If the output or its grid is closed.
    MissingPackageError
        If tensorstore is not installed.

    Notes
    -----
    Collective, and so are all methods. A record counts once all ranks have written it, which the ranks find out in the
    next `append`, `wait` or `close`. After a kill at any moment, readers see all records that counted. `Grid.close`
    closes the outputs of the grid. A ``with`` statement closes the output, unless its block raises an error.

    Examples
    --------
    >>> import halox, tempfile
    >>> with halox.Grid((8, 6), device="cpu") as grid, tempfile.TemporaryDirectory() as folder:
    ...     u = grid.ones()
    ...     with halox.Output(grid, f"{folder}/run.zarr", u=u) as out:
    ...         for step in range(3):
    ...             out.append(time=0.5 * step)
    ...             u *= 2
    ...     out.records
    3
    """

    def __init__(
        self,
        grid: HasDomain,
        path: str | PathLike[str],
        fields: Mapping[str, object] | None = None,
        /,
        *,
        mode: str = "w-",
        time: Time | None = None,
        every: Mapping[str, int] | None = None,
        mean: Sequence[str] | None = None,
        min: Sequence[str] | None = None,
        max: Sequence[str] | None = None,
        keepbits: Mapping[str, int] | None = None,
        region: Sequence[slice] | Mapping[str, Sequence[slice]] | None = None,
        dims: Sequence[str] | None = None,
        coords: Mapping[str, object] | None = None,
        attrs: Mapping[str, object] | None = None,
        compressors: object = None,
        buffer: int = 2,
        **named: object,
    ) -> None:
        domain = domain_of(grid)
        self._domain, self._world, self._layouts = domain, domain.world, domain.layouts

        def check() -> tuple[_Request, dict[str, object]]:
            where = arguments.path_of(path, written=True)
            if not isinstance(where, Path) or where.suffix == ".npy":
                raise CheckpointError(
                    f"path: {where}: an output is a Zarr group on a file system; name one, as in run.zarr"
                )
            load_tensorstore()
            given = arguments.fields_of(domain.layouts, fields, named, written=False)
            if not given:
                raise FieldError("no field given; write halox.Output(grid, path, u=u)")
            of_table = {field.table for field in given.values()}
            tables = {n: t for n, t in {**(fields or {}), **named}.items() if n in of_table}
            if mode not in _MODES:
                raise FieldError(f"mode: expected one of {', '.join(_MODES)}, got {shown(mode)}")
            if time is not None and mode != "a":
                raise FieldError('time: the time of a restart needs mode="a"; leave it out')
            options = SaveOptions(attrs, dims, coords, compressors)
            like_save = request_of(domain, where, given, options)
            strides = arguments.every_of(every, [f.table or name for name, f in given.items()])
            windows = {"mean": mean, "min": min, "max": max}
            series = series_of(given, strides, windows, keepbits)
            regions, is_common = arguments.regions_of(region, given)
            metadata, values, known = records.describe(
                like_save, series, regions, is_common=is_common
            )
            until = None if time is None else time_of(time, None)
            most = arguments.count_of("buffer", buffer, "records")
            request = _Request(
                where, given, tables, series, regions, metadata, values, known, mode, time, most
            )
            return request, compared(
                where,
                given,
                mode=mode,
                time=str(until),
                dims=like_save.dims,
                every=strides,
                **{name: arguments.names_of(names, name) for name, names in windows.items()},
                keepbits={name: one.keepbits for name, one in series.items()},
                region=str(regions),
            )

        with self._world.guard:
            self._world.begin(_MAKING)
            request = self._world.attempt(check, _MAKING, alike=True)
            self._path, self._buffer = request.path, request.buffer
            self._step, self._group_file = f"writing {self._path}", f"{self._path}/{METADATA}"
            self._store = Store.of_folder(self._path, self._path, self._world.limit_s)
            self._release: Callable[[], None] = lambda: None
            try:
                self._open(request)
            except BaseException:
                self._release()
                raise
        self._pending: deque[_Record] = deque()
        self._spare: defaultdict[int, list[Array]] = defaultdict(list)  # buffers by their bytes
        self._timer: threading.Timer | None = None  # that will count records, on rank 0
        self._lock = threading.Lock()  # of `records` and `_timer`
        self._counted = self.records  # in the metadata
        self._failure = Failure()  # of this rank: it surfaces in the next call, on all ranks
        self._closed = ""
        domain.outputs.append(self)
        self._forgotten = weakref.finalize(
            self, _forget, self._path, self._world.rank, self._release
        )

    def _open(self, request: _Request) -> None:
        """Make or open the group on rank 0, and its arrays on all ranks."""

        def begin() -> tuple[Any, list[float], dict[str, list[int]]]:
            exists = os.path.lexists(self._path)
            if request.mode == "w-" and exists:
                raise CheckpointError(
                    f'{self._path} exists; give mode="a" to continue it, or mode="w" to replace it'
                )
            if request.mode == "a" and exists:
                return self._continue(request)
            replacement = Replacement(
                self._path, partial(may_replace, outputs=True), is_folder=True
            )
            self._release = replacement.discard
            store = Store.of_folder(replacement.partial, self._path, self._world.limit_s)
            made = make(store, request.metadata, request.coords)
            replacement.commit()
            return made, [], {records.count_name(name): [] for name in request.tables}

        opened = self._world.from_first(checked(begin, self._step), _MAKING)
        self._metadata, self._times, self._counts = opened
        self._dates = records.dates_of(self._metadata) or ({} if self._times else None)
        self.records = len(self._times)

        def arrays() -> dict[str, Any]:
            if not self._path.is_dir():
                raise CheckpointError(
                    f"{self._path}: this rank does not see it, and rank 0 has made it; give a path on a file system "
                    "that all nodes share"
                )
            return {
                name: self._store.below(name).array(records.with_length(a, _ENDLESS), mode="write")
                for name, a in arrays_of(self._metadata).items()
                if records.every_of(a)
            }

        opened_arrays = self._world.attempt(checked(arrays, self._step), _MAKING)
        # Each record takes the arrays of particles anew; these ones would only keep memory.
        self._fields = {n: f._replace(array=f.table or f.array) for n, f in request.fields.items()}
        self._tables, self._variables = request.tables, {}
        for name, metadata in records.variables(self._metadata):
            field, series = StoredField.read(name, metadata), request.series[name]
            layout, region = request.fields[series.field].layout, request.regions[series.field]
            shards = ShardGrid(layout, field.shard[1:], region)
            self._variables[name] = _Variable(field, shards, series, opened_arrays[name])
        self._axes = {n: a for n, a in opened_arrays.items() if n not in self._variables}

        def accumulators() -> dict[str, Accumulator]:
            return {
                name: Accumulator(v.series, v.cells(self._fields[v.series.field]))
                for name, v in self._variables.items()
                if (v.series.method or v.series.keepbits) and not v.field.table
            }

        self._accumulators = self._world.attempt(accumulators, _MAKING)
        self._tell_unless_whole("continues")

    def _continue(self, request: _Request) -> tuple[Any, list[float], dict[str, list[int]]]:
        """Return the metadata, times and rows of an existing output, after removing later records; on rank 0."""
        lock = Lock(self._path)
        self._release = lock.release
        metadata = self._store.read_json()
        if not is_output(metadata):
            raise CheckpointError(
                f'{self._path} is not an output of halox.Output; give another path, or mode="w"'
            )
        records.check_alike(self._path, metadata, request.metadata)
        arrays = arrays_of(metadata)
        coords = {
            name: (
                request.coords[name],
                self._store.wait(self._store.below(name).array(arrays[name], mode="read").read())
                if name in arrays
                else None,
            )
            for name in request.given
        }
        records.check_coords(self._path, metadata, request.metadata, coords)

        def numbers(name: str) -> Any:
            stored = self._store.below(name).array(arrays[name], mode="write")
            return self._store.wait(stored.read()).tolist() if arrays[name]["shape"][0] else []

        count, times = arrays[records.TIME]["shape"][0], numbers(records.TIME)
        if request.until is not None:
            known = records.dates_of(metadata) if times else None
            count = bisect_right(times, time_of(request.until, known)[0])
        metadata, counts = records.sized(metadata, count), {}
        for table in request.tables:
            name = records.count_name(table)
            counts[name] = numbers(name)[: records.length_of(arrays[name], count)]
            for of_table in [n for n, f in request.fields.items() if f.table == table]:
                arrays_of(metadata)[of_table]["shape"][1] = max(counts[name], default=0)
        self._store.write_json(metadata)
        self._write_lengths(metadata)
        for half_written in ("zarr.json", "*/zarr.json", "time*/c/*", "*_count/c/*"):  # by a kill
            for file in self._path.glob(f"{half_written}_*.__lock"):
                file.unlink()
        for name, array in records.variables(metadata):
            for record in (self._path / name / "c").glob("[0-9]*"):
                if int(record.name) >= array["shape"][0]:
                    remove(record)
        return metadata, times[:count], counts

    def _write_lengths(self, metadata: Mapping[str, Any]) -> None:
        """Write the metadata of each array alone, for programs that open single arrays."""
        for name, array in arrays_of(metadata).items():
            if records.every_of(array):
                self._store.below(name).write_json(array)

    # Records

    @single_threaded
    def append(
        self, fields: Mapping[str, object] | None = None, /, *, time: Time, **named: object
    ) -> None:
        """Append a record of all fields, except fields that ``every`` leaves out.

        Parameters
        ----------
        fields : mapping of str to array, optional
            Arrays in place of the ones given at the start, for this record; or by keyword, as in ``u=new``.
        time : float or date
            Time of the record; larger than the time of the last one. Dates are of NumPy (`numpy.datetime64`), of the
            module ``datetime``, or of cftime, in one calendar.

        Notes
        -----
        Collective. Returns when the cells have been copied, so that the fields may be changed. Waits only if more than
        ``buffer`` records are not yet written.

        Examples
        --------
        >>> import halox, tempfile
        >>> with halox.Grid((8, 6), device="cpu") as grid, tempfile.TemporaryDirectory() as folder:
        ...     u, new = grid.zeros(), grid.ones()
        ...     out = halox.Output(grid, f"{folder}/run.zarr", u=u)
        ...     out.append(time=0)
        ...     out.append(time=1, u=new)
        ...     out.close()
        """
        self._check_open()
        self._world.begin(_APPENDING)
        self._reap(self._buffer - 1)

        def check() -> tuple[Any, Mapping[str, object], dict[str, int]]:
            (value, dates), given = time_of(time, self._dates), self._given(fields, named)
            rows = arguments.rows_of(given)
            unit = " ".join(["", *dates.values()])
            if self._times and value <= self._times[-1]:
                given_time = f"{shown(time)}, {value!r}{unit}," if unit else repr(value)
                raise FieldError(
                    f"time: {given_time} does not follow {self._times[-1]!r}, the time of the last record; "
                    'after a restart, give the time of its checkpoint, as in halox.Output(..., mode="a", time=...)'
                )
            alike = {"time": f"{value!r}{unit}", "fields": sorted(given)}
            return (value, dates, given), alike, rows

        (value, dates, given), rows_of_ranks = self._count(check, _APPENDING)
        arguments.place_rows(given, rows_of_ranks, self._world.rank)
        if self._dates is None:
            self._dates = dates
            records.set_dates(self._metadata, dates)
        if self._world.rank == 0:
            with self._lock:
                self._start_timer()
        number = len(self._times)
        self._times.append(value)
        record, totals = _Record([], []), dict[str, int]()
        for name, variable in self._variables.items():
            series = variable.series
            field = given.get(series.field, self._fields[series.field])
            is_due = (number + bool(series.method)) % series.every == 0
            if not is_due and not series.method:
                continue
            if field.table:
                totals[field.table] = field.layout.global_shape[0]
                variable = self._of_record(name, variable, field.layout)
            cells, accumulator = variable.cells(field), self._accumulators.get(name)
            if field.table and series.keepbits:
                accumulator = self._failure.attempt(partial(Accumulator, series, cells))
            if accumulator is not None:
                self._failure.attempt(partial(accumulator.add, cells, number))
                cells = accumulator.values
            if is_due:
                self._start(variable, cells, number // series.every, record)
        for table, rows in totals.items():
            self._counts[records.count_name(table)].append(rows)
        self._pending.append(record)

    def _of_record(self, name: str, variable: _Variable, layout: FieldLayout) -> _Variable:
        """Return a variable of particles for the rows of a record."""
        array, rows = arrays_of(self._metadata)[name], layout.global_shape[0]
        _, most, *components = array["shape"]
        array["shape"][1] = max(most, rows)
        of_record = {**array, "shape": [_ENDLESS, rows, *components]}
        store = self._store.below(name)
        opened = self._failure.attempt(partial(store.array, of_record, mode="write"))
        shards = ShardGrid(layout, variable.shards.shape, (slice(0, rows, 1),))
        return variable._replace(shards=shards, array=opened)

    @single_threaded
    def wait(self) -> None:
        """Wait until all records are complete and on disk.

        Collective; blocks. Afterwards, programs that open a single array see all records, too.
        """
        self._check_open()
        self._world.begin(_WAITING)
        self._reap(0)
        self._count(lambda: (None, {}, {}), _WAITING)

        def end() -> None:
            if self._world.rank == 0:
                self._end_timer()
                if self._failure.error is not None:
                    raise self._failure.error
                self._write_count()
                self._write_lengths(records.sized(self._metadata, self.records))

        self._world.attempt(checked(end, self._step), _WAITING)

    @single_threaded
    def close(self) -> None:
        """Wait for all records, and end the output; repeated calls have no effect.

        Collective; raises the errors of `wait`, except for an error that a call has raised before.
        """
        if self._closed == "closed":
            return
        try:
            if not self._closed and not self._world.failed:
                self.wait()
        finally:
            self._end()

    def __exit__(self, kind: object, *_: object) -> None:
        """Close the output; after an error, end it without other ranks, and keep the complete records."""
        if kind is None:
            self.close()
        else:
            self._end()

    def __repr__(self) -> str:
        """Return the path, the fields and the number of records."""
        return f"<halox.Output {self._path}: {', '.join(self._variables)}; {self.records} records>"

    def _end(self) -> None:
        """Wait for this rank's writes, which would disturb a later run, and release the path; local."""
        self._reap(0)
        if self._world.rank == 0:
            self._end_timer()
            self._failure.attempt(self._write_count)
        for future in [future for record in self._pending for future in record.futures]:
            with suppress(Exception):
                self._store.wait(future)
        self._closed = "closed"
        self._tell_unless_whole("ends")
        self._forgotten.detach()
        with suppress(ValueError):
            self._domain.outputs.remove(self)
        self._release()

    def _tell_unless_whole(self, what: str) -> None:
        """Tell the user of the variables with a window that has not ended."""
        count, variables = len(self._times), self._variables.items()
        inside = [n for n, v in variables if v.series.method and count % v.series.every]
        if inside and self._world.rank == 0:
            text = f"{what} inside a window of {', '.join(inside)}, whose values are lost"
            print(f"halox: {self._path} {text} ({count} records)", file=sys.stderr)

    def _check_open(self) -> None:
        if self._closed == "closed":
            raise ClosedError(
                f'{self._path} is closed; make another halox.Output, with mode="a" to continue it'
            )
        if self._closed:
            raise CheckpointError(
                f'{self._closed}; close the output, and make another with mode="a" to continue after {self.records} '
                "records"
            )

    def _given(self, fields: object, named: Mapping[str, object]) -> dict[str, CallerField]:
        """Return the arrays of a record, which must be like the fields; raises `FieldError`."""
        in_mapping = fields if isinstance(fields, Mapping) else {}
        named = {n: t for n, t in self._tables.items() if n not in in_mapping} | dict(named)
        given = arguments.fields_of(self._layouts, fields, named, written=False)
        for name, known in self._fields.items():
            if known.table and name not in given:
                raise FieldError(f"{name} is missing; give particles with the same attributes")
        for name, new in given.items():
            if name not in self._fields:
                raise FieldError(
                    f"{name} is no field of this output; it has {', '.join(self._fields)}"
                )
            known = self._fields[name]
            for what, mine, other in (
                ("dtype", known.described.dtype, new.described.dtype),
                ("layout", known.layout.spec.of_cells, new.layout.spec.of_cells),
            ):
                if mine != other:
                    raise FieldError(
                        f"{name}: the field has {what} {mine}, and this record {other}; give an array like the field, "
                        "as grid.zeros_like makes it"
                    )
        return given

    def _check_exists(self) -> None:
        """Raise `CheckpointError` if the group has been removed, since writes would make parts of it again."""
        if not os.path.isfile(self._group_file):
            raise CheckpointError(
                f"{self._group_file} has been removed or renamed; make another halox.Output"
            )

    def _reap(self, most: int) -> None:
        """Take finished records off the queue, and wait until at most ``most`` are left."""
        if self._world.rank == 0:
            self._failure.attempt(self._check_exists)
        while self._pending and self._failure.error is None:
            first = self._pending[0]
            if len(self._pending) <= most and not all(future.done() for future in first.futures):
                return
            for future in first.futures:
                self._failure.attempt(partial(self._store.wait, future))
            if self._failure.error is None:
                for memory in self._pending.popleft().memory:
                    self._spare[memory.nbytes].append(memory)

    def _count(
        self, check: Callable[[], tuple[_Checked, Mapping[str, object], dict[str, int]]], call: str
    ) -> tuple[_Checked, list[dict[str, int]]]:
        """Count the records that all ranks have written.

        Return the first item of ``check()`` and the rows of all ranks, its last item, and compare the other item.
        Raises on all ranks if a write or ``check`` fails on any.
        """

        def counted() -> tuple[_Checked, tuple[Mapping[str, object], int, dict[str, int]]]:
            if self._failure.error is not None:
                raise as_checkpoint_error(self._failure.error, self._step)
            mine, arguments, rows = check()
            return mine, (arguments, len(self._pending), rows)

        try:
            mine, records = self._world.gather(counted, call)
        except CheckpointError as error:
            self._closed = str(error)
            raise
        self._world.check_alike([arguments for arguments, _, _ in records.distinct])
        behind = max(pending for _, pending, _ in records.distinct)
        with self._lock:
            self.records = len(self._times) - behind
        return mine, [rows for _, _, rows in records] if self._tables else []

    def _start_timer(self) -> None:
        if self._timer is None and self._counted < self.records and self._failure.error is None:
            self._timer = threading.Timer(COUNT_S, self._count_later)
            self._timer.start()

    def _count_later(self) -> None:
        """Count the complete records, in a thread; it makes no MPI calls."""
        self._failure.attempt(self._write_count)
        with self._lock:
            self._timer = None
            self._start_timer()  # for the records since

    def _end_timer(self) -> None:
        while self._timer is not None:
            timer = self._timer
            timer.cancel()
            timer.join()
            if self._timer is timer:  # cancelled in time
                self._timer = None

    def _write_count(self) -> None:
        """Write the times of all complete records, and then their number."""
        count = self.records
        if count == self._counted:
            return
        for name, axis in self._axes.items():
            array = arrays_of(self._metadata)[name]
            first = records.length_of(array, self._counted) // records.TIMES * records.TIMES
            if name in self._counts:
                known = np.array(self._counts[name][first : records.length_of(array, count)], "i8")
            else:
                known = records.axis_values(name, array, self._times[:count], first)
            rows = rounded_up(len(known), records.TIMES)
            values = np.zeros((rows, *known.shape[1:]), known.dtype)
            values[: len(known)] = known
            self._store.wait(axis[first : first + rows].write(values))
        self._store.write_json(records.sized(self._metadata, count))
        self._counted = count

    def _start(self, variable: _Variable, cells: Any, place: int, record: _Record) -> None:
        """Copy the cells of a record, exchange cells of shared shards, and start the writes of this rank."""

        def write(cut: Cut, values: Array) -> None:
            if isinstance(cells, np.ndarray) and np.may_share_memory(values, cells):
                own = new(values.shape, values.dtype)
                np.copyto(own, values)
                values = own
            record.futures.append(start_write(variable.array, (place, *cut), values))

        def new(shape: tuple[int, ...], dtype: Any) -> Array:
            """Allocate a buffer: memory of an earlier record, which the kernel need not fill with zeros again."""
            nbytes = prod(shape) * np.dtype(dtype).itemsize
            room = 1 << nbytes.bit_length()  # few sizes, though each record has other particles
            spare = self._spare[room]
            memory = spare.pop() if spare else np.empty(room, np.uint8)
            record.memory.append(memory)
            buffer: Array = memory[:nbytes].view(dtype).reshape(shape)
            return buffer

        collect(
            self._world,
            variable.shards,
            cells,
            variable.field,
            _APPENDING,
            lambda cut, values: self._failure.attempt(partial(write, cut, values)),
            new=new,
        )


def _forget(path: Path, rank: int, release: Callable[[], None]) -> None:
    """Tell the user of an output that was never closed, and release its path."""
    if rank == 0:
        print(
            f"halox: {path} was not closed, so that its last records may be missing; call close(), or use a with "
            "statement",
            file=sys.stderr,
        )
        release()
