"""Two ranks of one process with an mlx5 adapter each, which a stand-in for pyverbs provides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from halox import datatypes as dt
from halox.paths.messages import Message, Part
from halox.paths.scatter_gather.keys import Keys, Memory, Rounds
from halox.paths.scatter_gather.mlx5_umr import Mlx5Umr
from halox.paths.scatter_gather.windows import MessageBlocks, agreed_chunk, propose
from halox.runtime import mlx5
from halox.runtime.waiting import Waiter


def message(*parts: Part) -> Message:
    return Message(1, "send", parts)


def blocks_of(*types: dt.Datatype) -> MessageBlocks:
    return MessageBlocks.of(message(*(Part(0, t) for t in types)))


def memory_of(array: np.ndarray, origin: int = 0) -> Memory:
    return Memory(array.ctypes.data + origin, array.ctypes.data, array.nbytes, array)


class Pair:
    """Connected engines and keys of two ranks; ``limits`` replace the limits of the ranks' adapters."""

    def __init__(self, *limits: Mapping[str, int]) -> None:
        self.engines = [
            Mlx5Umr(rank, mlx5.open_adapter(rank), lambda: Waiter(60.0, crowded=True))
            for rank in (0, 1)
        ]
        invited = [engine.invite([1 - rank]) for rank, engine in enumerate(self.engines)]
        for rank, engine in enumerate(self.engines):
            engine.connect({1 - rank: invited[1 - rank][rank]})
        for engine, changed in zip(self.engines, limits, strict=False):
            engine.limits = replace(engine.limits, **changed)
        self.keys = [Keys(engine) for engine in self.engines]


class Link:
    """A message from rank 0 to rank 1, with keys mapped and exchanged; both ends have blocks and memory."""

    def __init__(
        self, pair: Pair, ends: Sequence[MessageBlocks], memory: Sequence[Sequence[Memory]]
    ) -> None:
        self.pair = pair
        proposals = [propose(b, e.limits) for b, e in zip(ends, pair.engines, strict=True)]
        chunk = agreed_chunk(*proposals, ends[0].nbytes)
        assert chunk
        self.lists = [
            keys.acquire(b, chunk, m) for keys, b, m in zip(pair.keys, ends, memory, strict=True)
        ]
        self.exports = [
            keys.export(own, 1 - n)
            for n, (keys, own) in enumerate(zip(pair.keys, self.lists, strict=True))
        ]
        self.rounds = [
            Rounds(
                keys,
                self.lists[n],
                1 - n,
                self.exports[1 - n],
                keys.accept(1 - n, self.exports[1 - n]),
            )
            for n, keys in enumerate(pair.keys)
        ]
        assert self.rounds[0].count == self.rounds[1].count

    def move(self) -> None:
        sender, receiver = self.pair.engines
        for number in range(self.rounds[0].count):
            for rounds in self.rounds:
                rounds.enter(number)
            *first, last = self.rounds[0].transfers("put", number)
            for transfer in first:
                transfer()
            last(7)
            sender.complete()
            assert receiver.arrivals() == [(0, 7)]

    def release(self) -> None:
        for keys, own in zip(self.pair.keys, self.lists, strict=True):
            keys.release(own)
