"""Packing on a GPU: every case with every packer and every baseline, checked and then timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from halox.cli.bench import baselines
from halox.cli.bench.byhand import Move
from halox.cli.bench.options import Options
from halox.cli.bench.patterns import Case
from halox.cli.bench.rig import Buffer, Placed, Rig
from halox.cli.bench.rows import COPY, Row, Timed, rows_of
from halox.cli.bench.timing import Call
from halox.datatypes import Datatype
from halox.errors import DatatypeError, DeviceError, HaloxError

Measured = tuple[str, str, Timed | str, bool]
"""Name, kind, the times or what went wrong, and whether that is a failure."""


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
    """Make a packer by name; ``"auto"`` chooses as ``halox.pack`` does.

    Raises
    ------
    DatatypeError
        If that packer cannot take the datatype.
    """
    from halox.packing.choosing import choose, device_packer

    if method == "auto":
        method = choose(datatype, count, to_host=to_host).method
    return device_packer(method, datatype, count, device, max_blocks)


def run(
    rig: Rig, cases: Iterable[Case], options: Options, progress: Callable[[str], None]
) -> Iterator[Row]:
    """Measure cases; yields rows as they are there.

    Parameters
    ----------
    rig : Rig
    cases : iterable of Case
    options : Options
    progress : callable
        Told what comes next.

    Raises
    ------
    BrokenDeviceError
        If the GPU has stopped working; what has been yielded stands.

    Notes
    -----
    Not collective. A method that fails on a case is a row with the error; the others go on.
    """
    memory_errors = (DeviceError, MemoryError, rig.cp.cuda.memory.OutOfMemoryError)
    destinations = [name for name in options.destinations if name in rig.destinations()]
    for case in cases:
        progress(case.name)
        try:
            placed = Placed(rig, case)
        except memory_errors as error:
            yield _not_placed(case, options.directions[0], "-", f"left out: {error}")
            continue
        for destination in destinations:
            for direction in options.directions:
                progress(f"{case.name}, {direction}, {destination}")
                bench = _Bench(placed, destination, direction, options)
                try:
                    rows = bench.rows()
                except memory_errors as error:
                    rows = [_not_placed(case, direction, destination, f"left out: {error}")]
                yield from rows
        placed.close()


def _not_placed(case: Case, direction: str, destination: str, error: str) -> Row:
    what = (case.pattern, case.size, case.payload, case.block_bytes, 0, direction, destination)
    return Row(*what, "", "-", "packer", error=error)


_GRAPH_COPIES = 8


class _Bench:
    """All methods on one case, one destination and one direction."""

    def __init__(self, placed: Placed, destination: str, direction: str, options: Options) -> None:
        self._placed, self._case, self._rig = placed, placed.case, placed.rig
        self._destination, self._direction, self._options = destination, direction, options

    def rows(self) -> list[Row]:
        """Measure with warm and with cold caches, as far as they differ."""
        placed, case = self._placed, self._case
        placed.refill()
        turns = placed.turns if self._destination == "device" else 1
        buffer = self._rig.buffer(self._destination, case.payload, turns)
        found: dict[str, list[Measured]] = {cache: [] for cache in placed.caches}

        def add(name: str, kind: str, results: dict[str, Timed] | str, *, failed: bool) -> None:
            for cache, measured in found.items():
                result = results if isinstance(results, str) else results[cache]
                measured.append((name, kind, result, failed))

        for name, kind, prepare in self._ways(buffer):
            try:
                results: dict[str, Timed] | str = prepare()
                failed = False
            except DatatypeError as error:
                results, failed = f"not for this type: {error}", False
            except Exception as error:
                # One broken method must not keep the others from being measured.
                results, failed = f"{type(error).__name__}: {error}", True
                self._check_device(name, error)
            add(name, kind, results, failed=failed)
        bound = placed.bound_us(self._destination)
        return [
            row
            for cache, measured in found.items()
            for row in rows_of(self._common(cache), measured, bound)
        ]

    def _common(self, cache: str) -> dict[str, Any]:
        case = self._case
        return {
            "pattern": case.pattern,
            "size": case.size,
            "payload_bytes": case.payload,
            "block_bytes": case.block_bytes,
            "sector_bytes": self._placed.sector_bytes,
            "direction": self._direction,
            "destination": self._destination,
            "cache": cache,
        }

    def _check_device(self, name: str, error: Exception) -> None:
        try:
            self._rig.cp.cuda.Device(self._rig.device).synchronize()
        except Exception as broken:
            raise BrokenDeviceError(
                f"{name} on {self._case.name} ({self._direction}, {self._destination}) has broken "
                f"the GPU for this process: {error}; {broken}"
            ) from error

    def _ways(self, buffer: Buffer) -> Iterator[tuple[str, str, Callable[[], dict[str, Timed]]]]:
        """Yield name, kind, and a function that checks and measures, for each method."""
        yield COPY, "baseline", lambda: self._timed(self._copy(buffer))
        if self._options.baselines:
            for name, prepare in self._by_hand(buffer):
                yield name, "baseline", prepare
        for method in self._options.methods:
            yield method, "packer", lambda method=method: self._packer(method, buffer)  # type: ignore[misc]

    def _copy(self, buffer: Buffer) -> Call:
        placed, payload = self._placed, self._case.payload
        unpack = self._direction == "unpack"

        def call(stream: int, turn: int) -> None:
            ends = (placed.slabs[turn], buffer.address(turn))
            baselines.copy(*(ends[::-1] if unpack else ends), payload, stream)

        return call

    def _by_hand(self, buffer: Buffer) -> Iterator[tuple[str, Callable[[], dict[str, Timed]]]]:
        placed, case = self._placed, self._case
        moves = baselines.moves(case, placed.blocks, self._direction, self._rig.device)
        for name, prepare in moves.items():
            yield name, lambda name=name, prepare=prepare: self._baseline(name, prepare(), buffer)  # type: ignore[misc]

    def _baseline(self, name: str, move: Move, buffer: Buffer) -> dict[str, Timed]:
        placed = self._placed

        def call(stream: int, turn: int) -> None:
            move(placed.slabs[turn], buffer.address(turn), stream)

        many = name == baselines.BLOCK_COPIES
        scale = baselines.scaling(placed.blocks) if many else 1.0
        if scale == 1.0:
            self._check(call, buffer)
        elif self._direction == "pack":
            done = int(placed.blocks.lengths[: baselines.MOST_BLOCKS].sum())
            self._check(call, buffer, done)
        times = self._timed(call, graph=not many)
        if scale == 1.0:
            return times
        note = f"extrapolated from {baselines.MOST_BLOCKS} of {placed.blocks.n_blocks} blocks"
        return {
            cache: Timed(timed.us * scale, None, (timed.host_us or 0.0) * scale, note)
            for cache, timed in times.items()
        }

    def _packer(self, method: str, buffer: Buffer) -> dict[str, Timed]:
        placed, case = self._placed, self._case
        packer = make_packer(
            method,
            placed.datatype,
            case.count,
            self._rig.device,
            self._options.max_blocks,
            to_host=self._destination == "host",
        )
        unpack = self._direction == "unpack"

        def call(stream: int, turn: int) -> None:
            if unpack:
                packer.unpack(buffer.address(turn), placed.addresses[turn], stream)
            else:
                packer.pack(placed.addresses[turn], buffer.address(turn), stream)

        self._check(call, buffer)
        # A call of many copies is as many nodes of a graph, a thousand times over: it takes minutes.
        few = getattr(packer, "calls", 1) <= _GRAPH_COPIES
        times = self._timed(call, graph=few)
        if method != "auto":
            return times
        host_us = self._public_host_us() if self._destination == "device" else None
        return {
            cache: replace(timed, note=packer.method, host_us=host_us or timed.host_us)
            for cache, timed in times.items()
        }

    def _check(self, call: Call, buffer: Buffer, nbytes: int | None = None) -> None:
        placed = self._placed
        if self._direction == "pack":
            wrong = placed.check_packed(
                lambda stream: call(stream, 0), buffer, nbytes or self._case.payload
            )
        else:
            wrong = placed.check_unpacked(lambda stream: call(stream, 0), buffer)
        if wrong:
            raise HaloxError(f"wrong result: {wrong}")

    def _timed(self, call: Call, *, graph: bool = True) -> dict[str, Timed]:
        clock, placed = self._rig.clock, self._placed
        return {
            cache: clock.measure(call, turns=placed.turns if cache == "cold" else 1, graph=graph)
            for cache in placed.caches
        }

    def _public_host_us(self) -> float:
        """Host time of a cached ``halox.pack`` or ``halox.unpack``, all checks included."""
        import halox

        placed, rig = self._placed, self._rig
        array = placed.array
        if array is None:
            from halox.packing.pack_device import BOTTOM

            array = BOTTOM
        packed = rig.cp.empty(self._case.payload, "u1")
        datatype, count = placed.datatype, self._case.count
        rig.cp.cuda.Device(rig.device).synchronize()

        def pack() -> None:
            halox.pack(array, datatype, count, packed)

        def unpack() -> None:
            halox.unpack(packed, datatype, array, count)

        with rig.stream:
            return rig.clock.host_us(pack if self._direction == "pack" else unpack)
