"""Play stories of the fault matrix, several in the same processes, and check the outcome on each rank."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.failing import Job, run
from tests.faults.calls import CALLS
from tests.faults.table import ELSEWHERE_S, LIMIT_S, SLACK_S, Row

_MOST_KILLED = 6
_STORY_S = 40.0
_EARLY_S = 0.1


@dataclass
class Told:
    """Outcome of a story.

    Attributes
    ----------
    ranks : list of dict or None
        Outcomes on the survivor and on the victim; None if the rank did not complete the story.
    trouble : str
        Failure of the job as a whole; empty if there was none.
    """

    ranks: list[dict[str, Any] | None] = field(default_factory=list)
    trouble: str = "has not been played"


class Theatre:
    """Outcomes by story; plays a story on its first request.

    Parameters
    ----------
    rows : sequence of Row
        All stories that tests will request.
    folder : Path
    at_once : int
        Jobs at the same time.
    most : int
        Stories in a job, unless they kill a rank.
    """

    def __init__(self, rows: list[Row], folder: Path, at_once: int = 2, most: int = 60) -> None:
        self._folder, self._at_once = folder, at_once
        self._told: dict[Row, Told] = {}
        self._parts = _parts(rows, most)

    def __getitem__(self, row: Row) -> Told:
        if row not in self._told:
            # Play the part of this row and the next parts, since a story mostly waits.
            at = next(n for n, part in enumerate(self._parts) if row in part)
            now = [p for p in self._parts[at : at + self._at_once] if p[0] not in self._told]
            with ThreadPoolExecutor(self._at_once) as pool:
                for found in pool.map(self._play, now):
                    self._told |= found
        return self._told[row]

    def _play(self, rows: list[Row]) -> dict[Row, Told]:
        """Play rows; if a story ends the processes, play the remaining stories in new ones."""
        found: dict[Row, Told] = {}
        left = rows
        while left:
            folder = self._folder / f"{self._parts.index(rows)}.{len(found)}"
            left = self._play_on(left, folder, found)
        return found

    def _play_on(self, rows: list[Row], folder: Path, found: dict[Row, Told]) -> list[Row]:
        victims = len(rows) if rows[0].fault == "killed" else 1
        stories = [[row.call, row.path, row.fault, row.stage] for row in rows]
        ended = run(
            Job(
                "tests.faults.rank",
                {"stories": stories},
                ranks=1 + victims,
                limit_s=200 + _STORY_S * len(rows),
            ),
            folder,
        )
        for number, row in enumerate(rows):
            ranks = [ended.told.get(f"{number} saw {rank}") for rank in range(2)]
            found[row] = told = Told(ranks, "")
            if ranks[0] is None:
                told.trouble = f"a rank did not come to the end of the story: {ended.said[-4000:]}"
                return rows[number + 1 :]
            if ended.left:
                told.trouble = f"files are left in shared memory: {ended.left}"
        if any(one["status"] != 0 for one in ended.exits):
            told.trouble = f"a rank did not end by itself after this story: {ended.exits}"
        return []


def _parts(rows: list[Row], most_stories: int) -> list[list[Row]]:
    """Split rows into parts, each played in one job.

    A part with stories that kill a rank is short: each of its stories needs another process.
    """
    parts: list[list[Row]] = []
    for killed, most in ((False, most_stories), (True, _MOST_KILLED)):
        some = [row for row in rows if (row.fault == "killed") == killed]
        number = -(-len(some) // most)
        parts += [some[n::number] for n in range(number)]
    return parts


def check(row: Row, told: Told) -> None:
    """Assert that both ranks had the outcome that the fault requires, and that errors name the call."""
    assert not told.trouble, told
    saw, victim = told.ranks
    call = CALLS[row.call]
    assert saw is not None and "unprepared" not in saw, told
    if row.is_short:
        for one in told.ranks:
            assert one is not None and one["outcome"] == "returned" and one["right"], told
        return
    if row.fault == "elsewhere":
        for one in told.ranks:
            assert one is not None and one["outcome"] == "MismatchError", told
            assert one["late_s"] < ELSEWHERE_S, told
            assert re.search(rf"rank 0: [^,;]*({call.words})", one["text"]), told
            assert re.search(rf"rank 1: [^,;]*({call.other_words})", one["text"]), told
        return
    assert saw["late_s"] < LIMIT_S + SLACK_S, told
    if not (call.may_return and saw["outcome"] == "returned"):
        assert saw["outcome"] == "ExchangeTimeoutError" and "1" in saw["text"], told
        is_told = "where a call has failed" in saw["text"]
        if row.fault != "killed" and not is_told:  # a killed rank is detected at once
            assert saw["waited_s"] > LIMIT_S - _EARLY_S, told
        assert saw.get("later") or re.search(call.words, saw["text"]), told
        assert not call.refused or saw["next"] == call.refused, told
        assert saw.get("gpu_s", 0.0) < SLACK_S, told
    if row.fault == "stopped for long":
        # The victim continues after the other rank has timed out.
        assert victim is not None, told
        assert victim["outcome"] == "returned" or victim["is_halox"], told
