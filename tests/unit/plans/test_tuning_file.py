"""Files in the user's cache with any contents, and folders without room, by the file of tuned constants."""

from __future__ import annotations

import copy
import json
import math
import os
import resource
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halox.errors import HaloxError
from halox.plans.calibration import FORMAT, Fingerprint, load, save, tuning_file
from halox.plans.costs import Costs
from tests.support import trials

HERE = Fingerprint("NVIDIA H200", "580.65, CUDA 13000", "2 GPU(s) a node", "Open MPI v5")
VALID = {
    "format": FORMAT,
    "entries": [
        {"fingerprint": vars(HERE), "costs": Costs.default().to_dict()},
        {"fingerprint": {"gpu": "another"}, "costs": {}},
    ],
}

numbers = st.sampled_from([10**309, -(10**309), 10**4000, 1e308, 5e-324, math.inf, math.nan, -0.0])
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | numbers
values = leaves | st.lists(leaves, max_size=3) | st.dictionaries(st.text(max_size=9), leaves)


def places(node: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the position of every value in a document, as a tuple of keys."""
    yield at
    keys = node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in keys:
        yield from places(node[key], (*at, key))


@st.composite
def documents(draw: st.DrawFn) -> bytes:
    """Draw a file: the valid one with a value replaced, sometimes truncated or with bytes appended."""
    found: Any = copy.deepcopy(VALID)
    place, value = draw(st.sampled_from(list(places(VALID)))), draw(values)
    if place:
        parent = found
        for key in place[:-1]:
            parent = parent[key]
        parent[place[-1]] = value
    else:
        found = value
    text = json.dumps(found).encode()
    if draw(st.integers(0, 4)) == 0:
        text = text[: draw(st.integers(0, len(text)))] + draw(st.binary(max_size=5))
    return text


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "halox"


def loaded(path: Path) -> Costs | None:
    """Load the constants; checks that at most one warning, of one line, is raised."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = load(HERE, path)
    assert len(caught) <= 1
    for warning in caught:
        said = str(warning.message)
        assert found is None and "\n" not in said and len(said) < 2000
        assert str(path) in said and "run `halox tune` again" in said
    return found


def test_any_tuning_file_is_used_or_ignored(cache: Path) -> None:
    @settings(max_examples=trials(60))
    @given(documents())
    def check(text: bytes) -> None:
        cache.mkdir(exist_ok=True)
        path = cache / "tuning.json"
        path.write_bytes(text)
        found = loaded(path)
        for name in found.protocols if found else ():
            way, _, rest = name.partition(",")
            us = found.predict(*way.split("/", 1), 1 << 40, 8, 100, bool(rest)) if "/" in way else 0
            assert math.isfinite(us) and us >= 0
        save(HERE, Costs.default(), path)
        assert loaded(path) == Costs.default()
        assert os.listdir(cache) == ["tuning.json"]

    check()


STRANGE = {
    "a link to itself": lambda path: os.symlink(path, path),
    "brackets": lambda path: path.write_text("[" * 100_000),
    "an integer that Python does not read": lambda path: path.write_text("9" * 5000),
}


@pytest.mark.parametrize("make", STRANGE.values(), ids=STRANGE)
def test_strange_files_are_ignored_at_once(cache: Path, make: Any) -> None:
    cache.mkdir()
    path = tuning_file()
    make(path)
    with pytest.warns(UserWarning, match="is ignored, and paths are chosen by shipped constants"):
        assert load(HERE) is None
    save(HERE, Costs.default())
    assert loaded(path) == Costs.default() and path.is_file()


def test_a_file_that_finds_no_room_leaves_nothing_behind(cache: Path) -> None:
    save(HERE, Costs.default())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(HaloxError, match=r"cannot be written.*XDG_CACHE_HOME"):
            save(HERE, Costs.default().updated({}, "later"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(cache) == ["tuning.json"]
    assert loaded(cache / "tuning.json") == Costs.default()
