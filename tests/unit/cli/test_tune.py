"""``halox tune`` and ``halox info --paths``: measurements, files and output."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halox.cli import links, tune
from halox.cli.probing import Point, Sample, campaign, tuned_protocols
from halox.errors import HaloxError, PathError
from halox.paths.costs import ProtocolCost
from halox.plans import calibration
from halox.plans.costs import Costs
from halox.runtime.topology import Topology
from tests import support

ON_GPUS = tuned_protocols("gpu")
ALONE = Topology(np.array([1]), np.array([0]), {})

MACHINE = {
    name: ProtocolCost(2 * cost.latency_us, cost.message_us, tuple(s / 3 for s in cost.gb_per_s))
    for name, cost in Costs.default().protocols.items()
}
"""A machine with twice the latency and a third of the bandwidth of the shipped constants."""


def synthetic(name: str, point: Point) -> Sample:
    if name in ("peer/direct", "cuda_aware/mpi"):
        raise PathError(f"no {name} here")
    return point, MACHINE[name].us(point.nbytes, point.run_bytes, point.messages)


def quiet(what: str, done: int, total: int) -> None:
    assert what and 0 <= done < total


def test_a_campaign_finds_the_machine() -> None:
    before = Costs.default()
    found = campaign(synthetic, ON_GPUS, before, quiet)
    assert set(found.refused) == {"peer/direct", "cuda_aware/mpi"}
    assert set(found.costs) == set(ON_GPUS) - set(found.refused)
    for name, cost in found.costs.items():
        wanted = MACHINE[name]
        assert cost.latency_us == pytest.approx(wanted.latency_us, rel=0.01), name
        assert cost.message_us == pytest.approx(wanted.message_us, rel=0.01), name
        assert cost.gb_per_s == pytest.approx(wanted.gb_per_s, rel=0.01), name


@pytest.mark.parametrize("seed", range(4))
def test_noise_and_an_outlier_change_predictions_little(seed: int) -> None:
    rng = np.random.default_rng(seed)
    outlier, numbers = int(rng.integers(14)), Counter[str]()

    def noisy(name: str, point: Point) -> Sample:
        point, us = synthetic(name, point)
        numbers[name] += 1
        return point, us * (20 if numbers[name] == outlier + 1 else rng.normal(1, 0.02))

    found = campaign(noisy, ON_GPUS, Costs.default(), quiet)
    for name, cost in found.costs.items():
        for nbytes in (1 << 12, 1 << 17, 1 << 21):
            for run in (8, 64, 512, 4096):
                assert cost.us(nbytes, run) == pytest.approx(MACHINE[name].us(nbytes, run), rel=0.2)


@dataclass
class FakeProber:
    """One rank that measures `MACHINE`."""

    world: Any
    device: int | None = 0
    comm: Any = None

    def __call__(self, name: str, point: Point) -> Sample:
        return synthetic(name, point)


@pytest.fixture
def imagined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProber:
    support.require("mpi")
    from mpi4py import MPI

    from halox.runtime.world import World

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tune, "topology_and_costs", lambda prober: (ALONE, Costs.default()))
    monkeypatch.setattr(calibration, "_gpu", lambda device: ("NVIDIA H200", "580", 1))
    return FakeProber(World(MPI.COMM_SELF))


def test_measured_constants_are_written_and_shown(imagined: FakeProber) -> None:
    figures = tune.tuned_figures(imagined, quiet, ON_GPUS, write=True)  # type: ignore[arg-type]
    fingerprint = calibration.fingerprint_of(imagined.world, ALONE, 0)
    assert figures["file"] == str(calibration.tuning_file(fingerprint))
    written = calibration.load(fingerprint)
    assert written is not None and "halox tune" in written.origin
    for name in ("peer/ll", "ipc/staging", "staged/shared"):
        assert written.protocols[name].latency_us == pytest.approx(
            MACHINE[name].latency_us, rel=0.01
        )
    rows = [row for row in figures["rows"] if row["protocol"] == "peer/ll"]
    assert [row["constants"] for row in rows] == ["before", "after"]
    assert rows[0]["latency_us"] == Costs.default().protocols["peer/ll"].latency_us
    assert rows[1]["latency_us"] == pytest.approx(2 * rows[0]["latency_us"], rel=0.01)
    assert not [row for row in figures["rows"] if row["protocol"] == "peer/direct"]
    assert figures["not_measured"]["cuda_aware/mpi"] == "no cuda_aware/mpi here"
    json.dumps(figures, allow_nan=False)


def test_a_dry_run_writes_nothing(imagined: FakeProber, tmp_path: Path) -> None:
    figures = tune.tuned_figures(imagined, quiet, ON_GPUS, write=False)  # type: ignore[arg-type]
    assert "not written" in figures["file"] and not [*tmp_path.iterdir()]


def test_nothing_measured_is_an_error_and_writes_nothing(
    imagined: FakeProber, tmp_path: Path
) -> None:
    class Refusing(FakeProber):
        def __call__(self, *_: Any) -> Sample:
            raise PathError("the cable is out")

    refusing: Any = Refusing(imagined.world)
    with pytest.raises(HaloxError, match="the cable is out"):
        tune.tuned_figures(refusing, quiet, ON_GPUS, write=True)
    assert not [*tmp_path.iterdir()]


def test_info_paths() -> None:
    ended = support.halox("info", "--paths", "-n", "2", "--json")
    assert ended.returncode == 0, ended.stderr
    first, second = json.loads(ended.stdout)["rows"]
    assert first["0"] == second["1"] == "local/copy" and first["1"] == second["0"] != "local/copy"


def test_one_rank_is_not_enough() -> None:
    support.require("mpi")
    from mpi4py import MPI

    for check in (tune.tune_on_ranks, lambda _, comm: links.show(comm, as_json=True)):
        with pytest.raises(HaloxError, match="needs 2 or more"):
            check(Namespace(), MPI.COMM_SELF)
