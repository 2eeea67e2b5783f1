"""Limits of halox, made small or exceeded, so that tests meet large cases with few bytes."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from math import prod
from typing import Any

import numpy as np
import pytest

from halox.io.message_queue import as_void


def cut_shards(
    monkeypatch: pytest.MonkeyPatch, shard_bytes: int | None = None, chunk_bytes: int | None = None
) -> None:
    """Let checkpoints have shards and chunks of these sizes; None keeps a size."""
    from halox.io.checkpoint import chunks

    for name, nbytes in (("SHARD_BYTES", shard_bytes), ("CHUNK_BYTES", chunk_bytes)):
        if nbytes is not None:
            monkeypatch.setattr(chunks, name, nbytes)


def cache_few_plans(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let grids and transposes cache at most ``number`` plans."""
    from halox.plans import cache

    monkeypatch.setattr(cache, "CAPACITY", number)


def move_in_parts(monkeypatch: pytest.MonkeyPatch, part_bytes: int) -> None:
    """Let `gather`, `scatter` and ``.npy`` files move whole arrays in parts of this size."""
    from halox.io import gather_scatter
    from halox.io.checkpoint import moving

    for module in (gather_scatter, moving):
        monkeypatch.setattr(module, "PART_BYTES", part_bytes)


def save_as_from_gpus(monkeypatch: pytest.MonkeyPatch, part_bytes: int) -> None:
    """Let checkpoints and outputs copy host arrays as they copy arrays of GPUs, in parts of this size."""
    from halox.io.checkpoint import moving

    monkeypatch.setattr(moving, "is_device_array", lambda _: True)
    monkeypatch.setattr(moving, "DeviceStaging", HostStaging)
    monkeypatch.setattr(moving, "PART_BYTES", part_bytes)


class HostStaging(AbstractContextManager["HostStaging"]):
    """Moves parts of a host array as `DeviceStaging` moves parts of an array on a GPU, through one buffer."""

    def __init__(self, array: Any, part_bytes: int) -> None:
        self._array, self._buffer = as_void(array), np.empty(part_bytes, np.uint8)

    def read(self, indices: Iterable[Any]) -> Iterator[Any]:
        for index in indices:
            part = self._array[index]
            values = self.next_buffer(part.shape)
            values[...] = part
            yield values

    def next_buffer(self, shape: tuple[int, ...]) -> Any:
        self._shape, dtype = shape, self._array.dtype
        return self._buffer[: prod(shape) * dtype.itemsize].view(dtype).reshape(shape)

    def put(self, index: Any) -> None:
        self._array[index] = self.next_buffer(self._shape)
        self._buffer[:] = 0xAB

    def store(self, index: Any, values: Any) -> None:
        self.next_buffer(values.shape)[...] = values
        self.put(index)

    def __exit__(self, *_: object) -> None:
        pass


def refuse_swaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let checkpoints find a file system that cannot exchange two names."""
    monkeypatch.setattr("halox.io.checkpoint.folder._swap_names", lambda first, second: False)


def open_in_turn(monkeypatch: pytest.MonkeyPatch, comm: Any, between: Callable[[], object]) -> None:
    """Let rank 0 identify a checkpoint, then call ``between``, before the other ranks identify theirs."""
    from halox.io.checkpoint.loading import Reading

    begin = Reading.__init__

    def in_turn(self: Any, world: Any, path: Any, identify: Callable[[], str]) -> None:
        def late() -> str:
            if comm.rank:
                comm.Barrier()
            found = identify()
            if comm.rank == 0:
                between()
                comm.Barrier()
            return found

        begin(self, world, path, late)

    monkeypatch.setattr(Reading, "__init__", in_turn)


def reduce_in_pieces(monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    """Let allreduces on the host move arrays in pieces of this size, through shared memory and through MPI."""
    from halox.reductions.host import mpi_reduction, shared_reduction

    for module in (mpi_reduction, shared_reduction):
        monkeypatch.setattr(module, "PIECE_BYTES", piece_bytes)


def combine_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks without common memory combine numbers as many ranks do, rather than gather them."""
    monkeypatch.setattr("halox.runtime.gathered_values.MOST_GATHERED", 1)


def read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the host path read messages of any block length in place, as on large grids."""
    monkeypatch.setattr("halox.paths.host.DIRECT_BYTES", 1)


def fill_shared_memory(monkeypatch: pytest.MonkeyPatch, above: int = 0) -> None:
    """Let the allocation of more bytes of shared memory fail, as on a node without free shared memory."""
    from halox.runtime import shared_memory

    create = shared_memory.create

    def fail(name: str, nbytes: int) -> Any:
        if nbytes > above:
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(name, nbytes)

    monkeypatch.setattr(shared_memory, "create", fail)
