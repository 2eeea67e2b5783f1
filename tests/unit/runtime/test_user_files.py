"""Files in the user's cache with any contents: tuned constants, and answers about device pointers."""

from __future__ import annotations

import copy
import errno
import json
import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halox.errors import HaloxError
from halox.exchange import calibration
from halox.exchange.calibration import FORMAT, Fingerprint, load, save
from halox.exchange.costs import Costs
from halox.runtime import device_pointers
from halox.runtime.device_pointers import Verdict
from halox.runtime.user_files import MOST_BYTES, read_json, write_json
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
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)


def places(node: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the position of every value in a document, as a tuple of keys."""
    yield at
    keys = node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in keys:
        yield from places(node[key], (*at, key))


@st.composite
def documents(draw: st.DrawFn) -> bytes:
    """Draw a file: the valid one with some values replaced, sometimes truncated or with bytes appended."""
    found: Any = copy.deepcopy(VALID)
    for place in draw(st.lists(st.sampled_from(list(places(VALID))), min_size=1, max_size=2)):
        value = draw(values)
        if not place:
            found = value
            continue
        parent = found
        try:
            for key in place[:-1]:
                parent = parent[key]
            parent[place[-1]] = value
        except (TypeError, KeyError, IndexError):
            pass  # a former replacement removed this position
    text = json.dumps(found).encode()
    if draw(st.integers(0, 4)) == 0:
        text = text[: draw(st.integers(0, len(text)))] + draw(st.binary(max_size=5))
    return text


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


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


@settings(max_examples=trials(150))
@given(documents())
def test_any_tuning_file_is_used_or_ignored(place: Path, text: bytes) -> None:
    path = place / "tuning.json"
    path.write_bytes(text)
    found = loaded(path)
    if found is not None:
        for name in found.protocols:
            way, _, rest = name.partition(",")
            us = found.predict(*way.split("/", 1), 1 << 40, 8, 100, bool(rest)) if "/" in way else 0
            assert math.isfinite(us) and us >= 0
    save(HERE, Costs.default(), path)
    assert loaded(path) == Costs.default()
    assert os.listdir(place) == ["tuning.json"]


@settings(max_examples=trials(100))
@given(values, st.binary(max_size=5))
def test_any_file_of_answers_is_used_or_ignored(place: Path, value: Any, more: bytes) -> None:
    os.environ["XDG_CACHE_HOME"] = str(place / "answers")
    path = device_pointers.cache_file()
    assert path is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    for found in (value, {"a": value}, {"a": {"takes": True, "reason": value}}):
        path.write_bytes(json.dumps(found).encode() + more)
        verdict = asked("a")
        assert verdict.reason == "asked" or (verdict.takes and "earlier job" in verdict.reason)


def asked(key: str) -> Verdict:
    return device_pointers.asked_before(0, ask=lambda _: Verdict(True, "asked"), key=key)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(device_pointers, "_query_library", lambda: None)
    return tmp_path / "halox"


STRANGE = {
    "a pipe that nobody writes to": os.mkfifo,
    "an endless device": lambda path: os.symlink("/dev/zero", path),
    "a link to itself": lambda path: os.symlink(path, path),
    "a file of several GiB": lambda path: (path.touch(), os.truncate(path, 1 << 33)),
    "brackets": lambda path: path.write_text("[" * (MOST_BYTES - 1)),
    "an integer beyond all floats": lambda path: path.write_text(f'{{"format": {10**400}}}'),
    "an integer that Python does not read": lambda path: path.write_text("9" * 5000),
}


@pytest.mark.parametrize("make", STRANGE.values(), ids=STRANGE)
def test_strange_files_are_ignored_at_once(cache: Path, make: Any) -> None:
    cache.mkdir()
    path = calibration.tuning_file()
    make(path)
    with pytest.warns(UserWarning, match="is ignored, and paths are chosen by shipped constants"):
        assert load(HERE) is None
    save(HERE, Costs.default())
    assert loaded(path) == Costs.default() and path.is_file()
    answers = device_pointers.cache_file()
    assert answers is not None
    make(answers)
    assert asked("a").reason == "asked"
    assert "earlier job" in asked("a").reason and answers.is_file()


def test_other_set_ups_that_cannot_be_written_again_are_left_out(cache: Path) -> None:
    other = {"fingerprint": {"gpu": "x"}, "costs": math.nan}
    cache.mkdir()
    calibration.tuning_file().write_text(json.dumps({"format": FORMAT, "entries": [other]}))
    save(HERE, Costs.default())
    assert load(HERE) == Costs.default()


@pytest.mark.parametrize("step", ["mkstemp", "write", "fsync", "replace"])
def test_a_full_disk_leaves_nothing_behind(
    cache: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(HERE, Costs.default())

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    class FullFile:
        def __init__(self, handle: int, *_: Any, **__: Any) -> None:
            os.close(handle)

        def __enter__(self) -> FullFile:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        write = full

    if step == "mkstemp":
        monkeypatch.setattr("tempfile.mkstemp", full)
    elif step == "write":
        monkeypatch.setattr(os, "fdopen", FullFile)
    else:
        monkeypatch.setattr(os, step, full)
    with pytest.raises(HaloxError, match=r"cannot be written.*No space left.*XDG_CACHE_HOME"):
        save(HERE, Costs.default().updated({}, "later"))
    assert asked("a").reason == asked("a").reason == "asked"
    monkeypatch.undo()
    assert os.listdir(cache) == ["tuning.json"]
    assert loaded(cache / "tuning.json") == Costs.default()


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    # A file in the folder's place, since root may write to every folder.
    (tmp_path / "halox").write_text("")
    assert load(HERE) is None, "no file, no warning"
    with pytest.raises(HaloxError, match="cannot be written"):
        save(HERE, Costs.default())
    assert asked("a").reason == asked("a").reason == "asked"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file.json"
    write_json(path, {"a": [1, "\ud800"]})
    assert read_json(path) == {"a": [1, "\ud800"]}
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, math.nan)
    deep: list[Any] = []
    for _ in range(200_000):
        deep = [deep]
    with pytest.raises(ValueError, match="too deeply"):
        write_json(path, deep)
    while deep:  # or Python would recurse to free it
        deep = deep.pop()
    assert read_json(path) == {"a": [1, "\ud800"]}
