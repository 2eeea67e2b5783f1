"""Transfer of cells between the fields of a grid and the arrays of a checkpoint.

One rank writes a shard. Other ranks send their cells of the shard to this rank. A load needs no messages: every rank
reads its own cells.

In a save, all ranks process the shards in one order. A rank waits only for messages of the current or earlier shards,
so the ranks cannot deadlock. After an error a rank still sends and receives its messages, until all ranks raise the
error together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from math import prod
from typing import Any

import numpy as np

from halox.decomposition.blocks import blocks
from halox.errors import raising
from halox.io.checkpoint import chunks
from halox.io.checkpoint.chunks import Shard, ShardGrid, extents, relative
from halox.io.checkpoint.fields import StoredField, is_number
from halox.io.checkpoint.store import Store, StoreError, as_native, damaged, load_tensorstore
from halox.io.message_queue import MessageQueue, as_void
from halox.io.regions import Cut
from halox.runtime.arrays import Array
from halox.runtime.gpu.cuda import is_device_array
from halox.runtime.gpu.staging import DeviceStaging, Index
from halox.runtime.world import World

PART_BYTES = 8 << 20
"""Bytes of a part of a field on a GPU, whose copy takes much longer than its launch, and of a file's slab."""

_MESSAGES = 2
"""Messages at the same time."""

_SHARDS = 5
"""Shards whose memory the transfers at the same time may need.

TensorStore reads a whole shard in one call, and adjacent chunks in parts of several MiB, so that few transfers use few
cores.
"""

New = Callable[[tuple[int, ...], Any], Array]
"""Function that allocates a host array of a shape and a dtype."""

Advance = Callable[[int], None]
"""Function that reports progress; its argument is the number of bytes moved since its last call."""


def save(
    world: World, shards: ShardGrid, cells: Any, field: StoredField, store: Store, advance: Advance
) -> Exception | None:
    """Write this rank's shards of a field, on the host or a GPU; return this rank's error. Collective."""
    failure = Failure()
    array = failure.attempt(partial(store.below(field.name).array, field.metadata, mode="write"))
    with _Transfers(store, failure) as writes:

        def write(cut: Cut, values: Array) -> None:
            # The encoded bytes, and the values unless they are a view of the cells.
            nbytes = values.nbytes * (1 if values.base is not None else 2)
            writes.start(partial(start_write, array, cut, values), nbytes)

        collect(world, shards, cells, field, "a save", write, failure.attempting(advance))
    return failure.error


def collect(
    world: World,
    shards: ShardGrid,
    cells: Any,
    field: StoredField,
    step: str,
    write: Callable[[Cut, Array], None],
    advance: Advance = lambda nbytes: None,
    new: New = np.empty,
) -> None:
    """Call ``write`` with the box and the values of each shard that this rank writes. Collective.

    ``write`` and ``advance`` must not raise. The values are a view of the cells, or an array of ``new(shape, dtype)``.
    ``step`` names the call in errors.
    """
    with (
        MessageQueue(world, _MESSAGES, step) as queue,
        closing(_on_host(shards, cells, field, new)) as parts,
    ):
        for shard, values in zip(shards.shards, parts, strict=True):
            if shard.writer == world.rank:
                write(shard.cut, _assembled(shard, values, queue, world.rank, new))
            else:
                queue.send(values, shard.writer)
            advance(prod(values.shape) * field.dtype.itemsize)


def fill(
    shards: ShardGrid,
    cells: Any,
    field: StoredField,
    read: Callable[[Cut, Array], object],
    advance: Advance,
) -> None:
    """Set this rank's cells, part by part: ``read(box, values)`` reads a part into a contiguous array. Local."""
    with _staging(cells, field) as staged:
        for cut, local in zip(shards.own_cuts, shards.local_cuts, strict=True):
            values = as_void(np.empty(extents(cut), field.dtype))
            read(cut, values)
            if staged is not None:
                staged.store(local, values)
            else:
                as_void(cells)[local] = values
            advance(values.nbytes)


def load(
    shards: ShardGrid, cells: Any, field: StoredField, store: Store, array: Any, advance: Advance
) -> None:
    """Read this rank's cells of a field, on the host or a GPU. Local."""
    failure = Failure()
    is_direct = _is_readable_in_place(cells, field)
    with _staging(cells, field) as staged, _Transfers(store, failure, field) as reads:
        for cut, local in zip(shards.own_cuts, shards.local_cuts, strict=True):
            target = (
                as_void(cells)[local] if is_direct else np.empty(extents(cut), _host_dtype(field))
            )

            def place(local: Cut = local, target: Array = target) -> None:
                if staged is not None:
                    for place in blocks(target.shape, _part_cells(field)):
                        staged.store(_within(local, place), target[place])
                elif not is_direct:
                    as_void(cells)[local] = target
                advance(target.size * field.dtype.itemsize)

            nbytes = target.nbytes * (1 if is_direct else 2)
            reads.start(partial(_read, array, cut, target), nbytes, place)
    raising(failure.error)()


class Failure:
    """The first error of a rank, which continues its messages until all ranks raise the error together."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def attempt(self, action: Callable[[], Any]) -> Any:
        """Return ``action()``, or None if it fails; the action is not called after a failure."""
        return self.attempt_always(action) if self.error is None else None

    def attempting(self, advance: Advance) -> Advance:
        """Return a function that calls ``advance`` as `attempt` does."""
        return lambda nbytes: self.attempt(partial(advance, nbytes))

    def attempt_always(self, action: Callable[[], Any]) -> Any:
        """Return ``action()``, or None if it fails; the action is collective, and is also called after a failure."""
        try:
            return action()
        except Exception as error:
            self.error = self.error or error
        return None


class _Transfers:
    """Transfers of TensorStore, a few at once; all of them end with the block, also after an error or an interrupt.

    So no transfer changes a field or reads it after the call.
    """

    def __init__(self, store: Store, failure: Failure, read: StoredField | None = None) -> None:
        self._store, self._failure, self._field = store, failure, read
        self._futures: deque[tuple[Any, int, Callable[[], None]]] = deque()

    def start(
        self, begin: Callable[[], Any], nbytes: int, then: Callable[[], None] = lambda: None
    ) -> None:
        """Begin a transfer that needs ``nbytes`` of memory, unless one has failed; ``then`` is called after its end."""
        most = _SHARDS * chunks.SHARD_BYTES
        while self._futures and nbytes + sum(size for _, size, _ in self._futures) > most:
            self._end_oldest()
        future = self._failure.attempt(begin)
        if future is not None:
            self._futures.append((future, nbytes, then))

    def _end_oldest(self) -> None:
        future, _, then = self._futures[0]

        def end() -> None:
            try:
                self._store.wait(future)
            except StoreError as error:
                if self._field is None:
                    raise
                raise damaged(self._store, self._field, error) from error
            if self._failure.error is None:
                then()

        self._failure.attempt_always(end)
        future.cancel()  # has no effect, except at the time limit
        self._futures.popleft()

    def __enter__(self) -> _Transfers:
        return self

    def __exit__(self, *_: object) -> None:
        while self._futures:
            self._end_oldest()


def start_write(array: Any, cut: Index, values: Array) -> Any:
    """Start writing a box of an array; return the future of TensorStore."""
    return array[cut].write(_stored(values))


def _read(array: Any, cut: Cut, target: Array) -> Any:
    """Start reading cells into a host array, without a copy in between."""
    return load_tensorstore().array(_stored(target)).write(array[cut])


def _stored(values: Array) -> Array:
    """Return elements as the array in the store has them: numbers, or bytes along one more axis.

    The result has the same memory, except in the other byte order.
    """
    if is_number(values.dtype):
        return as_native(values)
    return values.view(f"V{values.itemsize}")[..., None].view(np.uint8)


def _is_readable_in_place(cells: Any, field: StoredField) -> bool:
    """Whether TensorStore reads into cells; of an array that is not aligned it makes a copy instead."""
    if is_device_array(cells) or not cells.flags.aligned:
        return False
    return field.dtype.isnative or not is_number(field.dtype)


def _host_dtype(field: StoredField) -> Any:
    """Return the dtype of host buffers; structured dtypes are bytes, since NumPy does not copy their padding."""
    if field.dtype.names is not None:
        return f"V{field.dtype.itemsize}"
    return field.dtype.newbyteorder("=") if is_number(field.dtype) else field.dtype


def _part_cells(field: StoredField) -> int:
    return max(1, PART_BYTES // field.dtype.itemsize)


def _staging(cells: Any, field: StoredField) -> AbstractContextManager[DeviceStaging | None]:
    """Return the staging of parts of a field on a GPU; None on the host."""
    if not is_device_array(cells):
        return nullcontext()
    return DeviceStaging(cells, _part_cells(field) * field.dtype.itemsize)


def _on_host(
    shards: ShardGrid, cells: Any, field: StoredField, new: New
) -> Generator[Array, None, None]:
    """Yield this rank's cells of each of its shards as host arrays: views, or copies of cells on a GPU."""
    cuts = shards.local_cuts
    if not cuts or not is_device_array(cells):
        yield from (as_void(cells)[cut] for cut in cuts)
        return
    most = _part_cells(field)
    places = [(cut, place) for cut in cuts for place in blocks(extents(cut), most)]
    with DeviceStaging(cells, most * field.dtype.itemsize) as staged:
        parts = staged.read(_within(cut, place) for cut, place in places)
        for cut in cuts:
            values = new(extents(cut), _host_dtype(field) if field.dtype.names else field.dtype)
            for place in blocks(values.shape, most):
                values[place] = as_void(next(parts))
            yield values


def _assembled(shard: Shard, values: Array, queue: MessageQueue, rank: int, new: New) -> Array:
    """Return the cells of a shard: this rank's cells, and the cells that other ranks send."""
    if len(shard.pieces) == 1:
        return values
    whole = new(extents(shard.cut), values.dtype)
    for piece in shard.pieces:
        place = whole[relative(piece.cut, shard.cut)]
        if piece.rank == rank:
            place[...] = values
        else:
            queue.receive(place, piece.rank)
    queue.end()
    return whole


def _within(cut: Cut, place: Index) -> Index:
    """Return the index of a part of a box, as an index of the array that contains the box.

    Examples
    --------
    >>> _within((slice(4, 9), slice(2, 6)), (1, slice(0, 3)))
    (5, slice(2, 5, None))
    """
    inner: list[slice | int] = [
        axis.start + index
        if isinstance(index, int)
        else slice(axis.start + index.start, min(axis.start + index.stop, axis.stop))
        for axis, index in zip(cut, place, strict=False)
    ]
    return (*inner, *cut[len(place) :])
