"""Checks of the work of streams that wait for words of memory, in many of its orders or in all.

With events, the streams determine an order of the work. With words they do not: a wait ends as soon as any stream has
written the value. Therefore the work runs in many orders, and each stream has a vector clock: after a wait it knows all
work that the writer of the word knew. If two kernels access the same bytes and one of them writes, the later kernel
must know the earlier kernel; otherwise they race.
"""

from __future__ import annotations

import random
from collections import defaultdict

from tests.fakes.fake_gpu import Memory, Op, Work

Place = tuple[int, int]
"""Rank and number of a stream."""


class WordWork(Work):
    """Work on the streams of all ranks, words included; ``without`` omits one step of words.

    With ``one_queue`` all streams of a rank share a hardware queue, in the order in which work was enqueued.
    """

    def __init__(
        self,
        logs: list[list[Op]],
        without: tuple[int, int, int] | None = None,
        *,
        one_queue: bool = False,
    ) -> None:
        if without is not None:
            rank, at, step = without
            op = logs[rank][at]
            rest = op.steps[:step] + op.steps[step + 1 :]
            fewer = Op(op.kind, op.stream, op.epoch, rest, op.event)
            log = [*logs[rank][:at], fewer, *logs[rank][at + 1 :]]
            logs = [*logs[:rank], log, *logs[rank + 1 :]]
        super().__init__(logs)
        self._queues: dict[Place, list[int]] = defaultdict(list)
        for number, (rank, stream) in enumerate(self.owners):
            self._queues[rank, 0 if one_queue else stream].append(number)
        self._recorded = [
            [other for other in before if self.ops[other].kind == "record"]
            for before in self.before
        ]

    def run(self, seed: int) -> None:
        """Run all work in a random order; assert that it terminates, has no race, and gives the expected values."""
        rng, masks, memory = random.Random(seed), self._masks(), Memory()
        at, step = dict.fromkeys(self._queues, 0), dict.fromkeys(self._queues, 0)
        words: dict[int, tuple[int, dict[int, int]]] = defaultdict(lambda: (0, {}))
        clocks: dict[int, dict[int, int]] = {}
        known: dict[Place, dict[int, int]] = {owner: {} for owner in self.owners}
        names = {owner: number for number, owner in enumerate(known)}
        ran: list[tuple[int, int, int]] = []
        left = sum(map(len, self._queues.values()))
        haste: dict[Place, float] = defaultdict(rng.random)
        while left:
            if rng.random() < 0.05:
                haste.clear()
            for queue in sorted(self._queues, key=lambda one: haste[one]):
                if at[queue] < len(self._queues[queue]) and self._can(
                    queue, at, step, clocks, words
                ):
                    break
            else:
                raise AssertionError("streams wait for one another for ever")
            number = self._queues[queue][at[queue]]
            op, owner = self.ops[number], self.owners[number]
            clock = known[owner]
            for other in self._recorded[number] if op.kind == "wait" else ():
                _join(clock, clocks[other])
            if op.kind == "words" and op.steps:
                kind, address, value = op.steps[step[queue]]
                if kind == "wait":
                    _join(clock, words[address][1])
                else:
                    assert words[address][0] != value, "a flag is set twice before it is taken"
                    words[address] = value, dict(clock)
                step[queue] += 1
                if step[queue] < len(op.steps):
                    continue
            if op.kind == "kernel":
                for other, name, tick in ran:
                    (ra, wa), (rb, wb) = masks[number], masks[other]
                    if (wa & (rb | wb) or ra & wb) and clock.get(name, 0) < tick:
                        raise AssertionError(
                            f"race between {self._text(number)} and {self._text(other)}"
                        )
                tick = clock[names[owner]] = clock.get(names[owner], 0) + 1
                ran.append((number, names[owner], tick))
                memory.run(op, self._text(number))
            clocks[number] = dict(clock)
            at[queue] += 1
            step[queue] = 0
            left -= 1
        assert not any(value for value, _ in words.values()), "a flag was not taken"

    def _can(
        self,
        queue: Place,
        at: dict[Place, int],
        step: dict[Place, int],
        done: dict[int, dict[int, int]],
        words: dict[int, tuple[int, dict[int, int]]],
    ) -> bool:
        number = self._queues[queue][at[queue]]
        op = self.ops[number]
        if op.kind == "wait":
            return all(other in done for other in self._recorded[number])
        if op.kind != "words" or not op.steps:
            return True
        kind, address, value = op.steps[step[queue]]
        return kind == "write" or words[address][0] == value

    def explore(self) -> int:
        """Visit all states that some order of words and events reaches, and return their number; none may deadlock."""
        queues = [
            [n for n in queue if self.ops[n].kind != "kernel"] for queue in self._queues.values()
        ]
        steps: list[list[tuple[str, int, int]]] = []
        events: dict[int, tuple[int, int]] = {}
        for place, queue in enumerate(queues):
            steps.append([])
            for number in queue:
                op = self.ops[number]
                if op.kind == "words":
                    steps[-1] += [(kind, address, value) for kind, address, value in op.steps]
                elif op.kind == "record":
                    events[number] = place, len(steps[-1]) + 1
                    steps[-1].append(("record", number, 0))
                else:
                    steps[-1] += [("event", other, 0) for other in self._recorded[number]]
        addresses = sorted({a for queue in steps for k, a, _ in queue if k in ("wait", "write")})
        word = {address: number for number, address in enumerate(addresses)}
        ends = tuple(map(len, steps))

        def settled(at: tuple[int, ...]) -> tuple[int, ...]:
            """Advance all queues over records and event waits, since the order of events makes no difference."""
            here, before = list(at), None
            while here != before:
                before = list(here)
                for place, n in enumerate(ends):
                    while here[place] < n and steps[place][here[place]][0] in ("record", "event"):
                        kind, what, _ = steps[place][here[place]]
                        if kind == "event" and here[events[what][0]] < events[what][1]:
                            break
                        here[place] += 1
            return tuple(here)

        found = {(settled((0,) * len(ends)), (0,) * len(addresses))}
        todo = list(found)
        while todo:
            at, values = todo.pop()
            moved = False
            for place, here in enumerate(at):
                kind, what, value = steps[place][here] if here < ends[place] else ("end", 0, 0)
                if kind not in ("wait", "write"):
                    continue
                old = values[word[what]]
                if kind == "wait" and old != value:
                    continue
                assert kind == "wait" or old != value, "a flag is set twice before it is taken"
                moved = True
                after = (*values[: word[what]], value, *values[word[what] + 1 :])
                state = settled((*at[:place], here + 1, *at[place + 1 :])), after
                if state not in found:
                    found.add(state)
                    todo.append(state)
            assert moved or at == ends, "streams wait for one another for ever"
        return len(found)


def _join(clock: dict[int, int], other: dict[int, int]) -> None:
    for name, tick in other.items():
        clock[name] = max(clock.get(name, 0), tick)
