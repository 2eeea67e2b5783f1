"""The tuning file: its location, atomic writes, and one warning when it is ignored."""

from __future__ import annotations

import os
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
    assert tuning_file() == tmp_path / "halox" / "tuning.json"
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    for nothing in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", nothing)
        assert tuning_file() == tmp_path / "me" / ".cache" / "halox" / "tuning.json"


def test_what_is_saved_is_loaded_for_each_set_up(cache: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(HERE) is None, "never tuned: no file, no warning"
        assert save(HERE, costs(1.0)) == cache / "halox" / "tuning.json"
        save(ELSEWHERE, costs(2.0))
        assert load(HERE) == costs(1.0)
        save(HERE, costs(3.0))
        assert load(HERE) == costs(3.0) and load(ELSEWHERE) == costs(2.0)
    assert os.listdir(cache / "halox") == ["tuning.json"]


@pytest.mark.parametrize("part", ["gpu", "driver", "topology", "mpi"])
def test_another_machine_s_file_is_ignored_with_one_warning(part: str) -> None:
    save(replace(HERE, **{part: "another"}), costs(1.0))
    save(Fingerprint("x", "y", "z", "w"), costs(2.0))
    with pytest.warns(UserWarning, match=f"{part} 'another'") as caught:
        assert load(HERE) is None
    assert len(caught) == 1


def test_readers_never_see_half_a_file() -> None:
    save(HERE, costs(1.0))
    stop, found = threading.Event(), []

    def read() -> None:
        while True:
            found.append(load(HERE))
            if stop.is_set():
                return

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reader = threading.Thread(target=read)
        reader.start()
        for number in range(15):
            save(HERE, costs(float(number)))
        stop.set()
        reader.join()
    assert found and None not in found


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
