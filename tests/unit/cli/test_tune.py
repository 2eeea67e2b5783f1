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
from hypothesis import given, settings
from hypothesis import strategies as st

from halox.cli import launcher, links, paths, report, tune
from halox.cli.probing import Point, Sample, campaign, error_of, tuned_protocols
from halox.errors import ExchangeTimeoutError, HaloxError, PathError
from halox.paths.base import Route
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
    found = campaign(synthetic, ON_GPUS, before, quiet, lambda: False)
    assert not found.cut_short and set(found.refused) == {"peer/direct", "cuda_aware/mpi"}
    assert set(found.costs) == set(ON_GPUS) - set(found.refused)
    for name, cost in found.costs.items():
        wanted = MACHINE[name]
        assert cost.latency_us == pytest.approx(wanted.latency_us, rel=0.01), name
        assert cost.message_us == pytest.approx(wanted.message_us, rel=0.01), name
        assert cost.gb_per_s == pytest.approx(wanted.gb_per_s, rel=0.01), name


def test_a_campaign_on_a_shared_gpu_and_several_messages_of_a_field() -> None:
    """Inner ranks of a row send two messages; constants of shared GPUs have names of their own."""

    def probe(name: str, point: Point) -> Sample:
        twice = Point(2 * point.nbytes, point.run_bytes, 2)
        return twice, MACHINE[f"{name}, shared GPU"].us(twice.nbytes, twice.run_bytes, 2)

    found = campaign(
        probe, ["ipc/put"], Costs.default(), quiet, lambda: False, shared_gpu=True
    ).costs["ipc/put, shared GPU"]
    wanted = MACHINE["ipc/put, shared GPU"]
    assert found.latency_us == pytest.approx(wanted.latency_us, rel=0.01)
    assert found.message_us == wanted.message_us
    assert found.gb_per_s == pytest.approx(wanted.gb_per_s, rel=0.01)


@pytest.mark.parametrize("seed", range(4))
def test_noise_and_an_outlier_change_predictions_little(seed: int) -> None:
    rng = np.random.default_rng(seed)
    outlier, numbers = int(rng.integers(14)), Counter[str]()

    def noisy(name: str, point: Point) -> Sample:
        point, us = synthetic(name, point)
        numbers[name] += 1
        return point, us * (20 if numbers[name] == outlier + 1 else rng.normal(1, 0.02))

    found = campaign(noisy, ON_GPUS, Costs.default(), quiet, lambda: False)
    for name, cost in found.costs.items():
        assert error_of(cost, found.checks[name]) < 0.1
        for nbytes in (1 << 12, 1 << 17, 1 << 21):
            for run in (8, 64, 512, 4096):
                assert cost.us(nbytes, run) == pytest.approx(MACHINE[name].us(nbytes, run), rel=0.2)


@given(st.lists(st.floats(0.1, 1e5), min_size=17, max_size=17))
@settings(max_examples=25)
def test_any_times_give_sensible_constants(times: list[float]) -> None:
    # ProtocolCost itself refuses negative constants and bandwidths that fall with longer runs.
    left = iter(times)
    found = campaign(
        lambda _, point: (point, next(left)), ["peer/ll"], Costs.default(), quiet, lambda: False
    )
    assert found.costs["peer/ll"].latency_us >= 0 and not found.refused


def test_short_runs_that_a_protocol_refuses_are_as_fast_as_longer_ones() -> None:
    def probe(name: str, point: Point) -> Sample:
        if point.run_bytes < 128:
            raise PathError("blocks too short")
        return synthetic(name, point)

    found = campaign(probe, ["peer/ll"], Costs.default(), quiet, lambda: False).costs["peer/ll"]
    *_, last, longest = MACHINE["peer/ll"].gb_per_s
    assert found.gb_per_s == pytest.approx((last, last, last, longest), rel=0.01)


def test_a_campaign_ends_in_time_and_keeps_what_it_has() -> None:
    calls = [0]

    def time_is_up() -> bool:
        calls[0] += 1
        return calls[0] > 3

    found = campaign(synthetic, ON_GPUS, Costs.default(), quiet, time_is_up)
    measured = {*found.costs, *(n for n, why in found.refused.items() if "no " in why)}
    assert found.cut_short and measured == set(ON_GPUS[:3])
    assert {n for n, why in found.refused.items() if why == "time ran out"} == set(ON_GPUS[3:])


def test_a_lost_rank_ends_the_campaign() -> None:
    def probe(name: str, point: Point) -> Sample:
        raise ExchangeTimeoutError("rank 0 has waited for rank 1")

    with pytest.raises(ExchangeTimeoutError):
        campaign(probe, ON_GPUS, Costs.default(), quiet, lambda: False)


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
    assert rows[0]["off_%"] > 40 and rows[1]["off_%"] < 1
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


def test_ranks_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv(launcher.STARTED_BY_HALOX, raising=False)
    assert tune.ranks_wanted(5) == 5 and (tune.ranks_wanted(None) or 0) >= 2
    monkeypatch.setenv("PMI_SIZE", "3")
    assert tune.ranks_wanted(None) is None


HOPS = [
    (0, 0, Route("local", "copy", "itself")),
    (1, 1, Route("local", "copy", "itself")),
    (0, 1, Route("peer", "ll", "a GPU each", 4.9, {"cuda_aware": "MPI cannot", "host": "GPU"})),
    (1, 0, Route("peer", "ll", "a GPU each", 4.9, {"cuda_aware": "MPI cannot"})),
]


def test_matrix_of_paths() -> None:
    figures = paths.figures_of(2, HOPS[::-1])
    lines = report.as_text(figures).splitlines()
    assert [line.split() for line in lines[3:6]] == [
        ["from", "\\", "to", "0", "1"],
        ["0", "local/copy", "peer/ll"],
        ["1", "peer/ll", "local/copy"],
    ]
    assert "  peer/ll: a GPU each (0 to 1, 1 to 0)" in lines
    assert lines[lines.index("not possible:") + 1 :] == [
        "  cuda_aware: MPI cannot (0 to 1, 1 to 0)",
        "  host: GPU (0 to 1)",
    ]


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


def test_every_protocol_with_constants_is_measured() -> None:
    shipped = {name.split(",")[0] for name in Costs.default().protocols}
    assert set(ON_GPUS) == shipped
