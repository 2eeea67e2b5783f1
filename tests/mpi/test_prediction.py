"""Predictions of steps: by hand, beside the plans of these ranks, over all process grids, and by the command."""

from __future__ import annotations

import argparse
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.cli import main
from halox.cli.predict import show
from halox.decomposition import FieldSpec, decompose
from halox.paths.costs import ProtocolCost
from halox.plans.costs import Costs
from halox.plans.prediction import CALL_US, HOST_COSTS, Model, predict

ONE = pytest.mark.ranks(1)
SLOW_NETWORK = (10.0, 0.001)  # us, and GB/s so low that packing takes no time


def alone(shape: Any = (64, 64), **options: Any) -> halox.Grid:
    return halox.Grid(shape, comm=MPI.COMM_SELF, device="cpu", **options)


def on_gpus(shape: tuple[int, ...], costs: Costs, **options: Any) -> Model:
    """Return the model of a float64 field on GPUs, of a periodic grid with a halo of one cell."""
    halo = ((1, 1),) * len(shape)
    divided = decompose(shape, 1, halo=halo, periodic=True)
    return Model(divided, halo, [(np.dtype("f8"), FieldSpec(halo))], True, True, costs, **options)


@ONE
class TestByHand:
    @pytest.mark.parametrize(
        ("shape", "options", "ranks", "of_rank", "messages", "nbytes"),
        [
            # A face of 64 cells, for one neighbour.
            ((64, 64), {}, 2, (32, 64), 1, 64 * 8),
            # Both neighbours are the same rank, which gets the halos of both sides and all fields in one message.
            (64, {"halo": ((1, 2),), "periodic": True}, 2, (32,), 1, 3 * 8),
            # Two neighbours share the latency.
            (64, {}, 4, (16,), 2, 2 * 8),
            # Blocks that are narrower than the halo: to two ranks with two rows on each side.
            ((29, 4), {"halo": 4}, 15, (2, 4), 4, 4 * 2 * 4 * 8),
        ],
    )
    def test_messages(
        self, shape: Any, options: Any, ranks: int, of_rank: Any, messages: int, nbytes: int
    ) -> None:
        with alone(shape, **options) as grid:
            (row,) = grid.predict([ranks], link=(7, 1))
            (several,) = grid.predict([ranks], "f8", "c16", grid.zeros(components=3), link=(7, 1))
            halo = options.get("halo", 1)
            periodic = options.get("periodic", False)
            usual = decompose(np.atleast_1d(shape).tolist(), ranks, halo=halo, periodic=periodic)
        assert (row["ranks"], row["rank_shape"], row["messages"]) == (ranks, of_rank, messages)
        assert row["proc_shape"] == usual.proc_shape
        assert row["bytes"] == nbytes and several["bytes"] == 6 * nbytes
        assert several["messages"] == messages
        assert row["exchange_us"] == pytest.approx(7 + nbytes / 1000)
        assert row["step_us"] == row["exchange_us"] and row["efficiency"] is None

    def test_overlap(self) -> None:
        options: dict[str, Any] = {"link": (5, 2), "proc_shape": (2, 1), "stencil": 10}
        with alone() as grid:
            (apart,) = grid.predict([2], **options)
            (hidden,) = grid.predict([2], overlap=True, **options)
            (late,) = grid.predict([2], overlap=True, **options | {"link": (500, 2)})
        stencil, inner = 32 * 64 * 10 / 1000, 30 * 62 * 10 / 1000
        assert apart["stencil_us"] == pytest.approx(stencil)
        assert apart["step_us"] == pytest.approx(stencil + 5.256)
        assert hidden["step_us"] == pytest.approx(stencil)
        assert late["step_us"] == pytest.approx(500.256 + stencil - inner)

    def test_ranks_of_a_node_share_its_network(self) -> None:
        with alone((64, 64)) as grid:
            (row,) = grid.predict(
                [4], node_ranks=2, network=SLOW_NETWORK, proc_shape=(2, 2), link=(3, 1)
            )
        # Rank 0 sends a face of 32 cells within its node, and a face and a corner out of it, as does the other rank.
        assert (row["messages"], row["bytes"]) == (3, (32 + 32 + 1) * 8)
        packing = HOST_COSTS.protocols["host/shared"]
        outside = 10 + packing.latency_us + packing.message_us + 2 * 33 * 8
        assert row["exchange_us"] == pytest.approx(3 + 32 * 8 / 1000 + outside)

    def test_copies_within_a_rank(self) -> None:
        copy = ProtocolCost(4.0, 0.0, (1.0, 2.0, 4.0, 8.0))
        costs = HOST_COSTS.updated({"local/copy": copy}, "by hand")
        with alone((128, 4), halo=((1, 1), (0, 0)), periodic=True) as grid:
            (row,) = predict(grid, [1], ["f8"], costs)
        # Two rows of 32 bytes at 2 GB/s.
        assert row["exchange_us"] == pytest.approx(4 + 64 / 2000)
        assert row["messages"] == row["bytes"] == 0

    def test_gpus_of_a_node(self) -> None:
        known = Costs.default()
        model = on_gpus((64, 64), known, graph=True, proc_shape=(2, 1))
        row = model.fastest(2)
        # Columns to itself in the kernel of the message with two rows, each with two corners.
        own = 2 * 32 * 8 / 250e3
        assert row["bytes"] == 2 * 66 * 8
        least = min(known.predict("peer", p, row["bytes"], 64 * 8) for p in ("ll", "staging"))
        assert row["exchange_us"] == pytest.approx(own + least, rel=0.01)
        row = on_gpus((64, 64), known, stencil=1e-3, reductions=1).fastest(2)
        assert row["step_us"] == 3 * CALL_US


@ONE
@pytest.mark.parametrize("ranks", [1, 12])
def test_the_fastest_process_grid_is_the_fastest_of_all(ranks: int) -> None:
    options: dict[str, Any] = {"link": (1, 0.1), "stencil": 3, "node_ranks": 6, "network": (2, 0.1)}
    with alone((30, 24, 14), halo=(1, 2, 1), periodic=(True, False, True)) as grid:
        (row,) = grid.predict([ranks], **options)
        times = {}
        for procs in itertools.product(range(1, ranks + 1), repeat=3):
            fits = all(n >= p for n, p in zip((30, 24, 14), procs, strict=True))
            if math.prod(procs) == ranks and fits:
                (one,) = grid.predict([ranks], proc_shape=procs, **options)
                times[procs] = one["step_us"]
    assert row["best_us"] == min(times.values()) == times[row["best_proc_shape"]]
    assert row["step_us"] == times[row["proc_shape"]]
    halo, periodic = (1, 2, 1), (True, False, True)
    assert (
        row["proc_shape"] == decompose((30, 24, 14), ranks, halo=halo, periodic=periodic).proc_shape
    )


@pytest.mark.ranks(1, 2, 4, 8)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((32, 24), {"periodic": True}),
        ((31, 25), {"halo": ((1, 2), (0, 1))}),
        ((16, 16, 17), {"periodic": (True, False, True), "corners": False}),
        ((16,), {"halo": 3}),
        ((9, 2), {"halo": ((2, 3), (1, 1)), "periodic": (True, False)}),
        ((17, 24), {"weights": lambda i, j: i < 4 + 0 * j}),
    ],
)
def test_messages_are_those_of_the_plan(
    comm: MPI.Intracomm, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    with halox.Grid(shape, comm=comm, device="cpu", **options) as grid:
        fields = grid.zeros("f8"), grid.zeros("f4", components=2)
        (row,) = grid.predict([comm.size], *fields)
        sent = [each for each in grid.explain(*fields).rows if each.direction == "send"]
        far = [each.nbytes for each in sent if each.peer != comm.rank]
        assert row["proc_shape"] == grid.proc_shape
        assert (row["bytes"], row["messages"]) == max(comm.allgather((sum(far), len(far))))
        assert math.prod(row["rank_shape"]) == max(comm.allgather(math.prod(grid.rank_shape)))


@ONE
@pytest.mark.parametrize(
    ("ranks", "options", "word"),
    [
        (0, {}, "ranks"),
        ([2, -1], {}, "ranks"),
        ("two", {}, "ranks"),
        ([5], {"proc_shape": (5, 1)}, "workable for 5 ranks: (1, 5)"),
        ([64], {}, "32"),
        ([4], {"weak": True, "proc_shape": (3, 0)}, "(2, 2)"),
        (2, {"speed": 1, "costs": 2}, "['costs', 'speed']"),
        (2, {"network": (5, -1)}, "network"),
        (2, {"link": 3}, "link"),
        (2, {"stencil": -1.0}, "stencil"),
        (2, {"reductions": 1.5}, "reductions"),
        (2, {"node_ranks": 0}, "node_ranks"),
        (2, {"node_ranks": 1}, "network"),
    ],
)
def test_errors(ranks: Any, options: dict[str, Any], word: str) -> None:
    with alone((4, 8), halo=(1, 4)) as grid, pytest.raises(halox.HaloxError) as caught:
        grid.predict(ranks, **options)
    assert word in str(caught.value)


@ONE
class TestAnswers:
    """Arguments of other kinds, and rows for grids of few cells."""

    def test_numbers_of_numpy(self) -> None:
        options: dict[str, Any] = {"link": (np.int64(5), np.float32(2)), "stencil": np.float32(10)}
        with alone() as grid:
            (row,) = grid.predict([2], proc_shape=(2, 1), **options)
        assert row["step_us"] == pytest.approx(32 * 64 * 10 / 1000 + 5 + 512 / 2000)
        assert {type(row[name]) for name in row if name.endswith("us")} == {float}

    def test_of_equal_process_grids_the_one_of_halox(self) -> None:
        with alone(100, halo=0) as grid:
            (row,) = grid.predict([13])
        with alone((64, 64), halo=0) as grid:
            (square,) = grid.predict([2])
        assert row["best_proc_shape"] == row["proc_shape"] == (13,)
        assert square["best_proc_shape"] == square["proc_shape"] == (2, 1)

    def test_ranks_share_only_gpus(self) -> None:
        with alone() as grid:
            (row,) = grid.predict([1], stencil=1, gpu_ranks=2)
        assert row["stencil_us"] == pytest.approx(4.096)
        one = on_gpus((64, 64), Costs.default(), graph=True, gpu_ranks=2, stencil=1).fastest(1)
        assert one["stencil_us"] == pytest.approx(4.096)


@ONE
class TestCommand:
    WORDS = ("predict", "4", "--grid", "64,64", "--link", "5,2", "--proc-shape", "0,1")

    def test_table(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([*self.WORDS, "--stencil", "10", "--device", "cpu"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("constants: shipped") and "best proc shape" in lines[2]
        assert [line.split()[0] for line in lines[3:]] == ["1", "2", "4"]
        assert "25.74" in lines[4]

    def test_json_and_picture(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("matplotlib")
        monkeypatch.syspath_prepend(
            str(tmp_path)
        )  # which restores the path that the script extends
        script, picture = tmp_path / "heat.py", tmp_path / "heat.png"
        (tmp_path / "heat_weights.py").write_text("WEIGHT = 0.5\n")
        script.write_text(
            "from heat_weights import WEIGHT\n"
            "def step(grid, u, v):\n    v[1:-1] = WEIGHT * (u[:-2] + u[2:])\n"
        )
        words = ["--script", str(script), "--fields", "f8,f4", "--png", str(picture), "--json"]
        assert main([*self.WORDS, *words, "--device", "cpu"]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        assert [row["bytes"] for row in rows] == [0, 64 * 12, 2 * 64 * 12]
        assert all(row["stencil_us"] > 0 for row in rows)
        assert picture.read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize("text", [None, "print('no step')\n"])
    def test_a_script_that_measures_nothing(
        self, text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        script = tmp_path / "heat.py"
        if text is not None:
            script.write_text(text)
        assert main([*self.WORDS, "--script", str(script), "--device", "cpu"]) == 2
        assert "heat.py measures nothing" in capsys.readouterr().err


@pytest.mark.ranks(2)
def test_links_are_measured_on_the_ranks(
    comm: MPI.Intracomm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from halox.cli import command, probing

    monkeypatch.setattr(probing, "_ROW_US", 100.0)
    words = ["predict", "2", "--grid", "32,32", "--device", "cpu", "--json"]
    args: argparse.Namespace = command.build_parser(words).parse_args(words)
    for node, origin in (("", "measured on 2 ranks"), ("rank", HOST_COSTS.origin)):
        monkeypatch.setenv("HALOX_NODE", node)  # ranks of different nodes measure nothing
        assert show(args, words) == 0
        out = capsys.readouterr().out
        if comm.rank == 0:
            figures = json.loads(out)
            assert figures["constants"] == origin
            assert all(row["exchange_us"] > 0 for row in figures["rows"][1:])
