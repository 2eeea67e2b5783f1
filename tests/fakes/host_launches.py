"""Stand-ins for the launches of `halox.packing.device`: NumPy copies in host memory, with shifted addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from halox.packing.refine import Side, cut_parts
from halox.runtime.gpu.marks import Mark


def leave(mark: Mark) -> None:
    """Write a mark, as a kernel does when it starts."""
    words = (ctypes.c_uint32 * 4).from_address(mark.pointer)
    words[0] = not mark.is_end
    if mark.is_end:
        words[1] = 1
    for number, at in enumerate(
        (ctypes.c_uint64 * mark.messages).from_address(mark.names or mark.pointer), 1
    ):
        found = ctypes.c_uint32.from_address(at).value
        if found != mark.name:
            words[2:4] = found, number


def touched(endpoint: Any) -> np.ndarray:
    """Return the addresses of an endpoint's bytes, in packed order."""
    found, datatype, count = endpoint[:3]
    blocks = datatype.blocks(count)
    ranges = [np.arange(n) + o for o, n in zip(blocks.offsets, blocks.lengths, strict=True)]
    return found.pointer + np.concatenate(ranges)


def side_of(side: Side) -> np.ndarray:
    """Return the addresses of the bytes of strided blocks, in packed order."""
    offsets = side.strided.offsets()[:, None] + np.arange(side.strided.block_bytes)
    return (side.pointer + offsets).ravel()


class Bytes(NamedTuple):
    """Addresses of bytes, and the number of their array if it can be shifted."""

    addresses: np.ndarray
    array: int | None = None


Step = tuple[Bytes, Bytes, Any]
"""Source and target, and the dtype for addition; None for a copy."""


class HostLaunch:
    """Writes the mark, then runs the steps; `launch` blocks."""

    def __init__(
        self, steps: Sequence[Step], keep: object = None, mark: Mark | None = None, word: int = 16
    ) -> None:
        self._steps, self.keep, self._mark, self._word = steps, keep, mark, word
        arrays = {side.array for step in steps for side in step[:2]} - {None}
        self._shifts = dict.fromkeys(arrays, 0)
        self.bases = [(self._shifts, array, array) for array in arrays]
        self.at = self.launch

    @property
    def steps(self) -> list[tuple[np.ndarray, np.ndarray, Any]]:
        """The steps at the present places of the arrays."""
        return [(*map(self._placed, step[:2]), step[2]) for step in self._steps]

    def _placed(self, side: Bytes) -> np.ndarray:
        by = self._shifts.get(side.array, 0)
        assert by % self._word == 0, "a word would not be aligned"
        return (side.addresses.astype("u8") + np.uint64(by)).astype("i8")

    def prepared(self) -> Callable[[], None]:
        """Return a function that runs the steps at the present places, also after a later shift."""
        return partial(self._run, self.steps)

    def launch(self, stream: Any = None) -> None:
        self._run(self.steps)

    def _run(self, steps: list[tuple[np.ndarray, np.ndarray, Any]]) -> None:
        if self._mark is not None:
            leave(self._mark)
        for read, to, dtype in steps:
            if not read.size:
                continue
            values = _load(read)
            if dtype is not None:
                values = (_load(to).view(dtype) + values.view(dtype)).view("u1")
            _store(to, values)


def _memory(addresses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the memory around some addresses, which are in one array, and the addresses' offsets in it."""
    first = int(addresses.min())
    nbytes = int(addresses.max()) - first + 1
    return np.frombuffer((ctypes.c_char * nbytes).from_address(first), "u1"), addresses - first


def _load(addresses: np.ndarray) -> np.ndarray:
    memory, at = _memory(addresses)
    return memory[at]


def _store(addresses: np.ndarray, values: np.ndarray) -> None:
    memory, at = _memory(addresses)
    memory[at] = values


def _end(endpoint: Any) -> Bytes:
    return Bytes(touched(endpoint), endpoint.number)


def _both(endpoint: Any, packed: int) -> tuple[Bytes, Bytes]:
    array = _end(endpoint)
    return array, Bytes(packed + np.arange(len(array.addresses)))


def _pack(
    moves: Any, device: int, word: int = 16, mark: Mark | None = None, pairs: Any = ()
) -> HostLaunch:
    steps = [(*_both(*move), None) for move in moves]
    return HostLaunch([*steps, *_pairs(pairs, "copy")], mark=mark, word=word)


def _unpack(moves: Any, device: int, word: int = 16, mark: Mark | None = None) -> HostLaunch:
    steps = [(*_both(*move)[::-1], None) for move in moves]
    return HostLaunch(steps, mark=mark, word=word)


def _add(moves: Any, device: int, word: int = 16, mark: Mark | None = None) -> HostLaunch:
    steps = [(*_both(*move)[::-1], move[0][1].uniform) for move in moves]
    return HostLaunch(steps, mark=mark, word=word)


def _fragments(
    moves: Any, fragments: int, device: int, word: int = 16, *, unpack: bool
) -> list[HostLaunch]:
    steps: list[list[Step]] = [[] for _ in range(fragments)]
    for endpoint, packed, ends in moves:
        found, datatype, count, array = endpoint
        parts = cut_parts(found.pointer, datatype, count, packed, ends, unpack=unpack, array=array)
        if isinstance(parts, int):
            both = _both(endpoint, packed)
            steps[parts].append((*(both[::-1] if unpack else both), None))
            continue
        for fragment, copies in zip(steps, parts, strict=True):
            fragment += [
                (*(Bytes(side_of(side), side.array) for side in copy), None) for copy in copies
            ]
    return [HostLaunch(fragment, word=word) for fragment in steps]


def _pairs(pairs: Any, operation: str) -> list[Step]:
    return [(_end(a), _end(b), b[1].uniform if operation == "add" else None) for a, b in pairs]


def _between(pairs: Any, operation: str, device: int, word: int = 16) -> HostLaunch:
    return HostLaunch(_pairs(pairs, operation), word=word)


def _zeros(endpoints: Any, device: int, word: int = 16) -> HostLaunch:
    ends = [*map(_end, endpoints)]
    zeros = np.zeros(max(len(end.addresses) for end in ends), "u1")
    at = zeros.ctypes.data + np.arange(zeros.size)
    steps = [(Bytes(at[: len(end.addresses)]), end, None) for end in ends]
    return HostLaunch(steps, keep=zeros, word=word)


FAKES: dict[str, Callable[..., Any]] = {
    "launch_pack": _pack,
    "launch_unpack": _unpack,
    "launch_add": _add,
    "fragment_launches": _fragments,
    "launch_between": _between,
    "launch_zeros": _zeros,
}
"""Stand-ins for the functions of `halox.packing.device`, by name."""


@contextmanager
def host_launches(wrap: Callable[[HostLaunch], Any] = lambda made: made) -> Iterator[None]:
    """Patch `halox.packing.device` with `FAKES`; ``wrap`` may replace each launch."""

    def wrapped(make: Callable[..., Any], *args: Any, **options: Any) -> Any:
        made = make(*args, **options)
        return [*map(wrap, made)] if isinstance(made, list) else wrap(made)

    with ExitStack() as stack:
        for name, fake in FAKES.items():
            stack.enter_context(patch(f"halox.packing.device.{name}", partial(wrapped, fake)))
        yield
