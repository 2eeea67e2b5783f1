"""Fits of cost constants to times with noise and to arbitrary times; test_tune.py has exact times."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halox.cli.probing import POINTS
from halox.exchange.costs import Costs
from halox.exchange.fitting import Sample, error_of, fit, follow_siblings
from halox.paths.costs import RUN_BYTES, ProtocolCost

SHIPPED = Costs.default().protocols
NAMES = "peer/ll", "peer/direct", "ipc/staging", "staged/shared"


def samples_of(cost: ProtocolCost) -> list[Sample]:
    return [
        Sample(p.nbytes, p.run_bytes, p.messages, cost.us(p.nbytes, p.run_bytes, p.messages))
        for p in POINTS
    ]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(2))
def test_noise_and_an_outlier_change_predictions_little(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    wanted = SHIPPED[name]
    measured = [replace(s, us=s.us * rng.normal(1, 0.03)) for s in samples_of(wanted)]
    outlier = int(rng.integers(len(measured)))
    measured[outlier] = replace(measured[outlier], us=measured[outlier].us * 20)
    found = fit(measured)
    assert found is not None and error_of(found, measured) < 0.05
    for nbytes in (1 << 12, 1 << 17, 1 << 21):
        for run in (8, 64, 512, 4096):
            assert found.us(nbytes, run) == pytest.approx(wanted.us(nbytes, run), rel=0.15)


@given(st.lists(st.floats(0.1, 1e5), min_size=len(POINTS), max_size=len(POINTS)))
@settings(max_examples=25)
def test_any_times_give_a_sensible_model_or_none(times: list[float]) -> None:
    # ProtocolCost itself refuses negative constants and bandwidths that fall with longer runs.
    found = fit(
        [Sample(p.nbytes, p.run_bytes, p.messages, us) for p, us in zip(POINTS, times, strict=True)]
    )
    assert found is not None


def test_times_that_do_not_determine_the_constants_give_none() -> None:
    every = samples_of(SHIPPED["peer/staging"])
    assert fit([]) is None
    assert fit([s for s in every if s.run_bytes == RUN_BYTES[-1]]) is None, "no short runs"
    assert fit([s for s in every if s.nbytes == 4096 << 10]) is None, "one size"
    assert fit([replace(s, us=float("nan")) for s in every]) is None
    cost = SHIPPED["peer/staging"]
    for messages in (1, 2):
        alike = fit(
            [
                replace(s, messages=messages, us=cost.us(s.nbytes, s.run_bytes, messages))
                for s in every
            ]
        )
        assert alike is not None
        assert alike.message_us == pytest.approx(0, abs=1e-9)
        assert alike.latency_us == pytest.approx(cost.latency_us + (messages - 1) * cost.message_us)


def test_a_protocol_without_measured_siblings_has_no_constants() -> None:
    measured = {"peer/staging": SHIPPED["peer/staging"]}
    assert follow_siblings("peer/direct", measured, SHIPPED, False) is not None
    assert follow_siblings("ipc/put", measured, SHIPPED, False) is None
    assert follow_siblings("peer/direct", measured, SHIPPED, True) is None
