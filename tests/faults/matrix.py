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

_AT_ONCE = 2
_MOST_KILLED = 6
_MOST_STORIES = 60
_STORY_S = 40.0
_EARLY_S = 0.1


@dataclass
class Told:
    """Outcome of a story.

    Attributes
    ----------
    ranks : list of dict or None
        Outcome on each rank, the victim last; None if the rank did not complete the story.
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
    survivors : int
        Ranks of each story besides the victim.
    """

    def __init__(self, rows: list[Row], folder: Path, survivors: int = 1) -> None:
        self._folder, self._survivors = folder, survivors
        self._told: dict[Row, Told] = {}
        self._parts = _parts(rows)

    def __getitem__(self, row: Row) -> Told:
        if row not in self._told:
            # Play the part of this row and the next part, to keep two cores busy.
            at = next(n for n, part in enumerate(self._parts) if row in part)
            now = [p for p in self._parts[at : at + _AT_ONCE] if p[0] not in self._told]
            with ThreadPoolExecutor(_AT_ONCE) as pool:
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
        survivors = self._survivors
        victims = len(rows) if rows[0].fault == "killed" else 1
        stories = [[row.call, row.path, row.fault, row.stage] for row in rows]
        ended = run(
            Job(
                "tests.faults.rank",
                {"stories": stories, "survivors": survivors},
                ranks=survivors + victims,
                survivors=survivors,
                limit_s=200 + _STORY_S * len(rows),
            ),
            folder,
        )
        for number, row in enumerate(rows):
            ranks = [ended.told.get(f"{number} saw {rank}") for rank in range(survivors + 1)]
            found[row] = told = Told(ranks, "")
            if None in ranks[:survivors]:
                told.trouble = f"a rank did not come to the end of the story: {ended.said[-4000:]}"
                return rows[number + 1 :]
            if ended.left:
                told.trouble = f"files are left in shared memory: {ended.left}"
        if any(one["status"] != 0 for one in ended.exits):
            told.trouble = f"a rank did not end by itself after this story: {ended.exits}"
        return []


def _parts(rows: list[Row]) -> list[list[Row]]:
    """Split rows into parts, each played in one job.

    A part with stories that kill a rank is short: each of its stories needs another process.
    """
    parts: list[list[Row]] = []
    for killed, most in ((False, _MOST_STORIES), (True, _MOST_KILLED)):
        some = [row for row in rows if (row.fault == "killed") == killed]
        number = -(-len(some) // most)
        parts += [some[n::number] for n in range(number)]
    return parts


def check(row: Row, told: Told) -> None:
    """Assert that every rank had the outcome that the fault requires."""
    assert not told.trouble, told
    *others, victim = told.ranks
    call = CALLS[row.call]
    unprepared = [one["unprepared"] for one in others if one and "unprepared" in one]
    assert not unprepared, told
    if row.is_short:
        for saw in told.ranks:
            assert saw is not None and saw["outcome"] == "returned" and saw["right"], told
        return
    if row.fault == "elsewhere":
        _check_mismatch(row, told)
        return
    last = len(others)
    for saw in others:
        assert saw is not None
        assert saw["late_s"] < LIMIT_S + SLACK_S, told
        if call.may_return and saw["outcome"] == "returned":
            continue
        assert saw["outcome"] == "ExchangeTimeoutError", told
        is_told = "where a call has failed" in saw["text"]
        if row.fault != "killed" and not is_told:  # a killed rank is detected at once
            assert saw["waited_s"] > LIMIT_S - _EARLY_S, told
            assert f"{LIMIT_S:g} s (HALOX_TIMEOUT)" in saw["text"], told
        # Of several survivors, one may have timed out first, and the other then names it.
        gone = r"\d+" if (saw.get("later") or is_told) and len(others) > 1 else last
        assert re.search(rf"\branks? \[?(\d+, )*{gone}\b", saw["text"]), told
        words = f"{call.words}|{call.again_words}" if saw.get("later") else call.words
        assert re.search(words, saw["text"]), f"{words!r} names the call: {told}"
        if call.refused:
            assert saw["next"] == call.refused, told
        assert saw.get("gpu_s", 0.0) < SLACK_S, told
    if row.fault == "stopped for long":
        # The victim continues after the others have timed out.
        assert victim is not None, told
        assert victim["outcome"] == "returned" or victim["is_halox"], told


def _check_mismatch(row: Row, told: Told) -> None:
    """Assert that all ranks raise an error that names the last rank's call and the others' call."""
    call, last = CALLS[row.call], len(told.ranks) - 1
    for saw in told.ranks:
        assert saw is not None and saw["outcome"] == "MismatchError", told
        assert saw["late_s"] < ELSEWHERE_S, told
        assert re.search(rf"\branks? (\d+, )*\d+: [^,;]*({call.words})", saw["text"]), told
        assert re.search(rf"\branks? (\d+, )*{last}: [^,;]*({call.other_words})", saw["text"]), told
