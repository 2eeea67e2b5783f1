"""Runs stories of the matrix, some at a time in the same processes, and judges what the ranks saw."""

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
        What each rank saw, the last one being that to which something happened; None if it did not come to the end.
    trouble : str
        Of the job as a whole.
    """

    ranks: list[dict[str, Any] | None] = field(default_factory=list)
    trouble: str = "has not been played"


class Theatre:
    """Plays the stories that are asked for, once.

    Parameters
    ----------
    rows : sequence of Row
        All that will be asked for.
    folder : Path
    survivors : int
        Ranks of each story besides the one that something happens to.
    """

    def __init__(self, rows: list[Row], folder: Path, survivors: int = 1) -> None:
        self._folder, self._survivors = folder, survivors
        self._told: dict[Row, Told] = {}
        self._parts = _parts(rows)

    def __getitem__(self, row: Row) -> Told:
        if row not in self._told:
            # The part of this row and the one after it, so that two cores have something to do.
            at = next(n for n, part in enumerate(self._parts) if row in part)
            now = [p for p in self._parts[at : at + _AT_ONCE] if p[0] not in self._told]
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                for found in pool.map(self._play, now):
                    self._told |= found
        return self._told[row]

    def _play(self, rows: list[Row]) -> dict[Row, Told]:
        """Play rows; where one ends the processes, the others go on in new ones."""
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
    """Rows that are played in the same processes; those that kill a rank need as many more."""
    parts: list[list[Row]] = []
    for killed, most in ((False, _MOST_STORIES), (True, _MOST_KILLED)):
        some = [row for row in rows if (row.fault == "killed") == killed]
        number = -(-len(some) // most)
        parts += [some[n::number] for n in range(number)]
    return parts


def check(row: Row, told: Told) -> None:
    """Assert that what the ranks saw is what they should have seen."""
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
        if row.fault != "killed" and not is_told:  # others notice a killed rank at once
            assert saw["waited_s"] > LIMIT_S - _EARLY_S, told
            assert f"{LIMIT_S:g} s (HALOX_TIMEOUT)" in saw["text"], told
        # One of several others may have given up before.
        gone = r"\d+" if (saw.get("later") or is_told) and len(others) > 1 else last
        assert re.search(rf"\branks? \[?(\d+, )*{gone}\b", saw["text"]), told
        words = f"{call.words}|{call.again_words}" if saw.get("later") else call.words
        assert re.search(words, saw["text"]), f"{words!r} names the call: {told}"
        if call.refused:
            assert saw["next"] == call.refused, told
        assert saw.get("gpu_s", 0.0) < SLACK_S, told
    if row.fault == "stopped for long":
        # It goes on among ranks that have given up.
        assert victim is not None, told
        assert victim["outcome"] == "returned" or victim["is_halox"], told


def _check_mismatch(row: Row, told: Told) -> None:
    """All ranks say which call the last one has made, and which one another has."""
    call, last = CALLS[row.call], len(told.ranks) - 1
    for saw in told.ranks:
        assert saw is not None and saw["outcome"] == "MismatchError", told
        assert saw["late_s"] < ELSEWHERE_S, told
        assert re.search(rf"\branks? (\d+, )*\d+: [^,;]*({call.words})", saw["text"]), told
        assert re.search(rf"\branks? (\d+, )*{last}: [^,;]*({call.other_words})", saw["text"]), told
