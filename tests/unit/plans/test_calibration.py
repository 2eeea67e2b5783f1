"""The tuning file: its location, and one warning when it is ignored."""

from __future__ import annotations

import json
import os
import resource
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halox.errors import HaloxError
from halox.paths.costs import ProtocolCost
from halox.plans.calibration import Fingerprint, describe_topology, load, save, tuning_file
from halox.plans.costs import Costs
from halox.runtime.topology import Topology

HERE = Fingerprint("NVIDIA H200", "580.65, CUDA 13000", "2 GPU(s) a node", "Open MPI v5")
ELSEWHERE = replace(HERE, gpu="NVIDIA A100")


def costs(latency_us: float) -> Costs:
    one = ProtocolCost(latency_us, 0.5, (1.0, 2.0, 3.0, 4.0))
    return Costs.default().updated({"peer/ll": one}, "measured")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuning_file(HERE).parent == tmp_path / "halox"
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    for nothing in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", nothing)
        assert tuning_file(HERE).parent == tmp_path / "me" / ".cache" / "halox"


def test_constants_of_a_set_up_are_loaded_in_it_alone(cache: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(HERE) is None, "never tuned: no file, no warning"
        assert save(HERE, costs(1.0)) == tuning_file(HERE)
        save(ELSEWHERE, costs(2.0))
        assert load(HERE) == costs(1.0)
        save(HERE, Costs({"peer/ll": costs(3.0).protocols["peer/ll"]}, "measured"))
        assert load(HERE) == costs(3.0) and load(ELSEWHERE) == costs(2.0)
        assert load(replace(HERE, mpi="another")) is None
    assert len(os.listdir(cache / "halox")) == 2


SPOILED = {
    "a folder": lambda path: path.mkdir(),
    "a link to itself": lambda path: os.symlink(path, path),
    "no JSON": lambda path: path.write_text('{"costs": '),
    "bytes": lambda path: path.write_bytes(b"\xff\xfe\x00\x80"),
    "brackets": lambda path: path.write_text("[" * 100_000),
    "an integer that Python does not read": lambda path: path.write_text("9" * 5000),
    "a list": lambda path: path.write_text("[]"),
    "negative constants": lambda path: path.write_text(
        json.dumps({"costs": costs(1.0).to_dict()}).replace("1.0", "-1.0")
    ),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_a_spoiled_file_is_ignored_with_a_warning(spoil: Any, cache: Path) -> None:
    path = tuning_file(HERE)
    path.parent.mkdir()
    spoil(path)
    with pytest.warns(UserWarning, match="is ignored, and paths are chosen by shipped") as caught:
        assert load(HERE) is None
    (said,) = (str(warning.message) for warning in caught)
    assert str(path) in said and "run `halox tune` again" in said and "\n" not in said
    if not path.is_dir():
        save(HERE, costs(1.0))
        assert load(HERE) == costs(1.0)


def test_a_file_that_finds_no_room_leaves_the_old_one(cache: Path) -> None:
    save(HERE, costs(1.0))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(HaloxError, match=r"cannot be written.*XDG_CACHE_HOME"):
            save(HERE, costs(2.0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(os.listdir(cache / "halox")) == 1 and load(HERE) == costs(1.0)


@pytest.mark.parametrize(
    ("gpus", "nodes", "pairs", "said"),
    [
        ((1, 2), (0, 0), (1, 0), "one rank each, memory mapped: all, one node"),
        ((1, 1), (0, 0), (0, 1), "shared by ranks, memory mapped: none, one node"),
        ((1, 2, 3), (0, 0, 0), (2, 1), "one rank each, memory mapped: some, one node"),
        ((1, 2), (0, 1), (0, 0), "one rank each, memory mapped: no pairs, several nodes"),
    ],
)
def test_topology_in_words(gpus: Any, nodes: Any, pairs: Any, said: str) -> None:
    """The words tell set-ups apart in the file."""
    topology = Topology(np.array(gpus), np.array(nodes), {}, pairs=pairs)
    assert describe_topology(topology) == said
