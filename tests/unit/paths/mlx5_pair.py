"""Two ranks of one process with an mlx5 adapter each, which a stand-in for pyverbs provides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from halox import datatypes as dt
from halox.paths.messages import Message, Part
from halox.paths.scatter_gather.mlx5.engine import Mlx5Engine
from halox.paths.scatter_gather.mlx5.keys import Keys, Memory
from halox.paths.scatter_gather.mlx5.windows import MessageBlocks, agreed_chunk, propose
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
            Mlx5Engine(rank, mlx5.open_adapter(rank), lambda: Waiter(60.0, crowded=True))
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
        assert chunk is not None
        self.lists = [
            keys.acquire(b, chunk, m) for keys, b, m in zip(pair.keys, ends, memory, strict=True)
        ]
        self.exports = [
            keys.export(own, 1 - n)
            for n, (keys, own) in enumerate(zip(pair.keys, self.lists, strict=True))
        ]
        self.rkeys = pair.keys[0].accept(1, self.exports[1])
        pair.keys[1].accept(0, self.exports[0])
        assert len(self.rkeys) == len(self.lists[0].keys) == len(self.lists[1].keys)

    def post(self) -> None:
        last = len(self.rkeys) - 1
        for n, (key, rkey) in enumerate(zip(self.lists[0].keys, self.rkeys, strict=True)):
            self.pair.engines[0].write(1, rkey, 7 if n == last else None, key)

    def move(self) -> None:
        sender, receiver = self.pair.engines
        self.post()
        sender.complete()
        assert receiver.arrivals() == [(0, 7)]

    def release(self) -> None:
        for keys, own in zip(self.pair.keys, self.lists, strict=True):
            keys.release(own)
