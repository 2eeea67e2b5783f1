"""Packing on a GPU: every case with every packer and every baseline, checked and then timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from halox.datatypes import Datatype
from halox.errors import DatatypeError, DeviceError, HaloxError
from halox_bench.common.byhand import Move
from halox_bench.common.rig import Buffer, Rig, copy
from halox_bench.common.rows import BASELINE, Row
from halox_bench.common.timing import Timed
from halox_bench.pack import baselines
from halox_bench.pack.options import PackOptions
from halox_bench.pack.patterns import Case
from halox_bench.pack.placed import Placed
from halox_bench.pack.rows import COPY, PACKER, Measured, rows_of
from halox_bench.ranks.bench import Bench

Times = dict[str, Timed]
"""Times by the state of the cache."""


class BrokenDeviceError(HaloxError):
    """The GPU refuses all further work of this process."""


def make_packer(
    method: str,
    datatype: Datatype,
    count: int,
    device: int,
    max_blocks: int | None = None,
    *,
    to_host: bool = False,
) -> Any:
    """Make a packer by name; ``"auto"`` is the choice of ``halox.pack``.

    Raises
    ------
    DatatypeError
        If the packer does not support the datatype.
    """
    from halox.packing.choosing import choose, device_packer

    if method == "auto":
        method = choose(datatype, count, to_host=to_host).method
    return device_packer(method, datatype, count, device, max_blocks)


class DeviceBench(Bench):
    """Every packer and every baseline on one GPU.

    Parameters
    ----------
    rig : Rig, optional
        By default the first GPU.

    Raises
    ------
    BrokenDeviceError
        From `measure`, if the GPU has stopped working.
    """

    def __init__(self, options: PackOptions, rig: Rig | None = None) -> None:
        self._options = options
        self._rig = rig = rig or Rig(repeats=options.repeats)
        self._destinations = [one for one in options.destinations if one in rig.destinations()]

    def heading(self) -> str:
        """Return the speeds of large copies, and the time of an empty kernel."""
        rig = self._rig
        speeds = {"device": f"{rig.bytes_per_us / 1e6:.2f} TB/s read and written"}
        for name in self._destinations:
            if name != "device":
                speeds[name] = f"{rig.link_bytes_per_us(name) / 1e3:.1f} GB/s"
        empty = rig.clock.empty()
        graph = "" if empty.graph_us is None else f", {empty.graph_us:.2f} us in a graph"
        shown = "; ".join(f"{name} {speed}" for name, speed in speeds.items())
        return f"large copies: {shown}\nempty kernel: {empty.us:.2f} us in a stream{graph}"

    def measure(self, case: Case) -> list[Row]:
        """Measure one case; a method that fails is a row with the error."""
        memory_errors = (DeviceError, MemoryError, self._rig.cp.cuda.memory.OutOfMemoryError)
        options, rows = self._options, list[Row]()
        try:
            placed = Placed(self._rig, case)
        except memory_errors as error:
            return self._left_out(case, options.directions[0], "-", error)
        with placed:
            for destination in self._destinations:
                for direction in options.directions:
                    try:
                        rows += _OneDirection(placed, destination, direction, options).rows()
                    except memory_errors as error:
                        rows += self._left_out(case, direction, destination, error)
        return rows

    def _left_out(
        self, case: Case, direction: str, destination: str, error: Exception
    ) -> list[Row]:
        alike = {"direction": direction, "destination": destination}
        return rows_of(case, alike, [("-", PACKER, f"left out: {error}", False)], None)


_GRAPH_COPIES = 8


class _OneDirection:
    """All methods on one case, one destination and one direction."""

    def __init__(
        self, placed: Placed, destination: str, direction: str, options: PackOptions
    ) -> None:
        self._placed, self._case, self._rig = placed, placed.case, placed.rig
        self._destination, self._direction, self._options = destination, direction, options
        self._unpack = direction == "unpack"

    def rows(self) -> list[Row]:
        """Measure with warm and with cold caches, if they differ."""
        placed, case = self._placed, self._case
        placed.refill()
        turns = placed.turns if self._destination == "device" else 1
        buffer = self._rig.buffer(self._destination, case.payload, turns)
        found: dict[str, list[Measured]] = {cache: [] for cache in placed.caches}

        for name, kind, measure in self._methods(buffer):
            try:
                results: Times | str = measure()
                failed = False
            except DatatypeError as error:
                results, failed = f"not for this type: {error}", False
            except Exception as error:
                # A failed method does not end the run.
                results, failed = f"{type(error).__name__}: {error}", True
                self._check_device(name, error)
            for cache, measured in found.items():
                result = results if isinstance(results, str) else results[cache]
                measured.append((name, kind, result, failed))
        bound = placed.bound_us(self._destination)
        alike: dict[str, Any] = {"direction": self._direction, "destination": self._destination}
        alike |= {"sector_bytes": placed.sector_bytes}
        return [
            row
            for cache, measured in found.items()
            for row in rows_of(case, {**alike, "cache": cache}, measured, bound)
        ]

    def _check_device(self, name: str, error: Exception) -> None:
        try:
            self._rig.cp.cuda.Device(self._rig.device).synchronize()
        except Exception as broken:
            raise BrokenDeviceError(
                f"{name} on {self._case.name} ({self._direction}, {self._destination}) has broken "
                f"the GPU for this process: {error}; {broken}"
            ) from error

    def _methods(self, buffer: Buffer) -> Iterator[tuple[str, str, Callable[[], Times]]]:
        """Yield name, kind, and a function that checks and measures, for each method."""
        placed, rig = self._placed, self._rig
        yield COPY, BASELINE, partial(self._copy, buffer)
        if self._options.baselines:
            moves = baselines.moves(self._case, placed.blocks, self._direction, rig.device)
            for name, prepare in moves.items():
                yield name, BASELINE, partial(self._prepared, name, prepare, buffer)
        for method in self._options.methods:
            yield method, PACKER, partial(self._packer, method, buffer)

    def _prepared(self, name: str, prepare: Callable[[], Move], buffer: Buffer) -> Times:
        return self._baseline(name, prepare(), buffer)

    def _copy(self, buffer: Buffer) -> Times:
        def move(slab: int, packed: int, stream: int) -> None:
            ends = (packed, slab) if self._unpack else (slab, packed)
            copy(*ends, self._case.payload, stream)

        return self._placed.timed(self._placed.moving(move, buffer))

    def _baseline(self, name: str, move: Move, buffer: Buffer) -> Times:
        placed = self._placed
        call = placed.moving(move, buffer)
        many = name == baselines.BLOCK_COPIES
        scale = baselines.scaling(placed.blocks) if many else 1.0
        if scale == 1.0 or not self._unpack:
            done = int(placed.blocks.lengths[: baselines.MOST_BLOCKS].sum()) if many else None
            placed.check(call, buffer, unpack=self._unpack, nbytes=done)
        times = placed.timed(call, graph=not many)
        if scale == 1.0:
            return times
        note = f"extrapolated from {baselines.MOST_BLOCKS} of {placed.blocks.n_blocks} blocks"
        return {
            cache: Timed(timed.us * scale, None, (timed.host_us or 0.0) * scale, note)
            for cache, timed in times.items()
        }

    def _packer(self, method: str, buffer: Buffer) -> Times:
        placed = self._placed
        packer = make_packer(
            method,
            placed.datatype,
            self._case.count,
            self._rig.device,
            self._options.max_blocks,
            to_host=self._destination == "host",
        )
        call = placed.packing(packer, buffer, unpack=self._unpack)
        placed.check(call, buffer, unpack=self._unpack)
        # A graph of a thousand calls with many copies each takes minutes.
        few = getattr(packer, "calls", 1) <= _GRAPH_COPIES
        times = placed.timed(call, graph=few)
        if method != "auto":
            return times
        host_us = self._public_host_us() if self._destination == "device" else None
        return {
            cache: replace(timed, note=packer.method, host_us=host_us or timed.host_us)
            for cache, timed in times.items()
        }

    def _public_host_us(self) -> float:
        """Host time of a cached ``halox.pack`` or ``halox.unpack``, all checks included."""
        import halox

        placed, rig = self._placed, self._rig
        array = placed.array
        packed = rig.cp.empty(self._case.payload, "u1")
        datatype, count = placed.datatype, self._case.count
        rig.cp.cuda.Device(rig.device).synchronize()

        def pack() -> None:
            halox.pack(array, datatype, count, packed)

        def unpack() -> None:
            halox.unpack(packed, datatype, array, count)

        with rig.stream:
            return rig.clock.host_us(unpack if self._unpack else pack)
