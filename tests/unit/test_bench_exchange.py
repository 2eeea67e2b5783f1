"""``halox bench exchange`` and ``pingpong``: cases, the check of results, hand-written kernels, rows, the commands."""

from __future__ import annotations

import ctypes
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halox.cli import main
from halox.decomposition import FieldLayout, FieldSpec, decompose
from halox.errors import HaloxError
from halox.packing.host import HostPacker
from halox_bench.common.byhand import THREADS
from halox_bench.common.kernels import defines
from halox_bench.exchange import baselines, targets_host
from halox_bench.exchange import plots as exchange_plots
from halox_bench.exchange.baselines_gpu import Segments, table
from halox_bench.exchange.cases import (
    FACES,
    MILC,
    ExchangeCase,
    Neighbourhood,
    Wanted,
    cases,
    milc,
)
from halox_bench.exchange.oracle import Oracle
from halox_bench.exchange.rows import ExchangeRow, header, line
from halox_bench.pingpong import baselines as pingpong_baselines
from halox_bench.pingpong.cases import PATTERNS, PingPongOracle, select
from halox_bench.ranks.clock import Timing
from halox_bench.ranks.rows import choices
from tests.support import halox_bench, require

CASES = [
    ExchangeCase((5,), "x", 2),
    ExchangeCase((4, 5), "y"),
    ExchangeCase((4, 5), "all", 2, "c8"),
    ExchangeCase((3, 4, 5), "x", 1, "f4", 2),
    ExchangeCase((3, 4, 5), "faces", 2, "i2"),
    ExchangeCase((3, 4, 5), "all", 1, "u1", 3),
    ExchangeCase((3, 2, 3, 4), "t"),
    ExchangeCase((2, 2, 3, 2), "all", 1, "c8", 1, (3,)),
]


def places(case: ExchangeCase, ranks: int) -> dict[int, tuple[int, ...]]:
    """Coordinates of the ranks, in an order that is not the natural one."""
    found = list(np.ndindex(*case.proc_shape(ranks)))
    return dict(enumerate(found[::-1]))


def exchanged(
    case: ExchangeCase, arrays: dict[int, list[np.ndarray]], ranks: int
) -> dict[int, list[np.ndarray]]:
    """Return every rank's arrays after the exchange, worked out on the whole grid by NumPy's padding."""
    coords = places(case, ranks)
    h, axes = case.halo, range(case.ndim)
    pads = [(h, h) if a in case.along else (0, 0) for a in axes]
    pads += [(0, 0)] * len(case.components)
    inside = tuple(slice(h, h + n) for n in case.shape)
    after: dict[int, list[np.ndarray]] = {rank: [] for rank in range(ranks)}
    for field in range(case.fields):
        shape = tuple(n * p for n, p in zip(case.shape, case.proc_shape(ranks), strict=True))
        whole = np.empty((*shape, *case.components), case.dtype)
        for rank in range(ranks):
            owned = tuple(
                slice(c * n, c * n + n) for c, n in zip(coords[rank], case.shape, strict=True)
            )
            whole[owned] = arrays[rank][field][inside]
        wrapped = np.pad(whole, pads, mode="wrap")
        for rank in range(ranks):
            result = arrays[rank][field].copy()
            for d in [(0,) * case.ndim, *case.directions]:
                mine, theirs = [], []
                for a, c, n in zip(axes, coords[rank], case.shape, strict=True):
                    first, width = {-1: (0, h), 0: (h, n), 1: (h + n, h)}[d[a]]
                    mine.append(slice(first, first + width))
                    start = c * n + first - (0 if a in case.along else h)
                    theirs.append(slice(start, start + width))
                result[tuple(mine)] = wrapped[tuple(theirs)]
            after[rank].append(result)
    return after


def filled(case: ExchangeCase, ranks: int, step: int = 1) -> tuple[dict[int, Any], dict[int, Any]]:
    """Oracles and arrays of all ranks, before an exchange."""
    coords = places(case, ranks)
    oracles = {r: Oracle(Neighbourhood(case, coords, r)) for r in range(ranks)}
    arrays = {
        r: [np.zeros(case.padded_shape, case.dtype) for _ in range(case.fields)]
        for r in range(ranks)
    }
    for rank, oracle in oracles.items():
        oracle.fill(arrays[rank], step)
    return oracles, arrays


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
class TestOracle:
    def test_knows_what_padding_gives(self, case: ExchangeCase, ranks: int) -> None:
        oracles, before = filled(case, ranks)
        after = exchanged(case, before, ranks)
        for rank, oracle in oracles.items():
            assert oracle.wrong(before[rank], 1) > 0, "halos are empty before"
            assert oracle.wrong(after[rank], 1) == 0
            assert oracle.wrong(after[rank], 2) > 0, "the last exchange's values are wrong"

    def test_one_wrong_value_anywhere_is_seen(self, case: ExchangeCase, ranks: int) -> None:
        oracles, before = filled(case, ranks)
        after = exchanged(case, before, ranks)[0]
        for field in after:
            flat = field.reshape(-1)
            for at in range(0, flat.size, max(1, flat.size // 40)):
                kept = flat[at]
                flat[at] = kept + 1
                assert oracles[0].wrong(after, 1) == 1
                flat[at] = kept

    def test_pieces_are_those_of_the_library(self, case: ExchangeCase, ranks: int) -> None:
        coords = places(case, ranks)
        shape = tuple(n * p for n, p in zip(case.shape, case.proc_shape(ranks), strict=True))
        domain = decompose(
            shape, ranks, halo=case.halo, periodic=case.periodic, proc_shape=case.proc_shape(ranks)
        )
        spec = FieldSpec(((case.halo,) * 2,) * case.ndim, components_after=case.components)
        rank_at = {domain.coords_of(rank): rank for rank in range(ranks)}
        for rank in range(ranks):
            near = Neighbourhood(case, coords, rank)
            layout = FieldLayout(domain, rank_at[coords[rank]], spec)
            for pieces, end in ((near.sends, "send"), (near.receives, "recv")):
                ours = sorted((coords[p.peer], p.starts, p.extents) for p in pieces if not p.field)
                theirs = [
                    (domain.coords_of(region.peer), getattr(region, end))
                    for region in layout.regions(case.corners)
                ]
                n = case.ndim
                assert ours == sorted((c, b.starts[:n], b.subsizes[:n]) for c, b in theirs if b)

    def test_both_ends_list_a_pair_of_ranks_alike(self, case: ExchangeCase, ranks: int) -> None:
        coords = places(case, ranks)
        near = [Neighbourhood(case, coords, rank) for rank in range(ranks)]
        for a in range(ranks):
            for b in range(ranks):
                sent = [(p.tag, p.field, p.extents) for p in near[a].sends if p.peer == b]
                got = [(p.tag, p.field, p.extents) for p in near[b].receives if p.peer == a]
                assert sent == got

    def test_kernel_by_hand_moves_the_pieces(self, case: ExchangeCase, ranks: int) -> None:
        """Pack with the kernel, pass segments on by hand, unpack with the kernel: an exchange."""
        require("cxx")
        from tests.unit.bench_gpu import library

        oracles, arrays = filled(case, ranks)
        coords = places(case, ranks)
        near = {rank: Neighbourhood(case, coords, rank) for rank in range(ranks)}
        sides = {r: (Segments(near[r].sends), Segments(near[r].receives)) for r in near}
        packed = {r: [aligned(side.nbytes) for side in sides[r]] for r in near}

        def launch(rank: int, side: int, unpack: int) -> None:
            pieces = (near[rank].sends, near[rank].receives)[side]
            base = packed[rank][side].ctypes.data
            to = [base + offset for offset in sides[rank][side].offsets]
            rows, word, each = table(pieces, [a.ctypes.data for a in arrays[rank]], to)
            settings = defines("byhand", WORD_BYTES=word, UNPACK=unpack, THREADS=THREADS)
            library("byhand", settings).run_faces(
                ctypes.c_uint(len(pieces) * each),
                ctypes.c_uint(THREADS),
                ctypes.byref(rows),
                ctypes.c_uint(each),
            )

        for rank in near:
            launch(rank, 0, 0)
        for rank in near:
            for peer, (at, n) in sides[rank][0].spans.items():
                there, length = sides[peer][1].spans[rank]
                assert length == n
                packed[peer][1][there : there + n] = packed[rank][0][at : at + n]
        for rank, oracle in oracles.items():
            launch(rank, 1, 1)
            assert oracle.wrong(arrays[rank], 1) == 0


def aligned(nbytes: int) -> np.ndarray:
    memory = np.zeros(nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes]


class TestCases:
    def test_ranks_are_spread_innermost_first(self) -> None:
        cube = ExchangeCase((8, 8, 8), "faces")
        found = [cube.proc_shape(n) for n in (1, 2, 4, 6, 8)]
        assert found == [(1, 1, 1), (1, 1, 2), (1, 2, 2), (1, 2, 3), (2, 2, 2)]
        assert ExchangeCase((8, 8, 8), "y").proc_shape(4) == (1, 4, 1)
        outer = ExchangeCase((8, 8, 8), "all", outer=True)
        assert [outer.proc_shape(n) for n in (1, 2, 4)] == [(1, 1, 1), (2, 1, 1), (2, 2, 1)]
        assert outer.name == "8^3 f8 all outer"

    def test_the_whole_grid_of_cases(self) -> None:
        found = cases(Wanted())
        assert len({case.name for case in found}) == len(found) > 50
        assert {case.ndim for case in found} == {1, 2, 3, 4}
        assert {case.faces for case in found} == set(FACES) - {"t"}
        assert {(n,) * 3 for n in (16, 768)} | set(MILC) <= {case.shape for case in found}
        assert len({case.dtype for case in found}) > 3 and len({case.halo for case in found}) > 2
        assert 5 < len(cases(Wanted(), quick=True)) < 20

    def test_combinations(self) -> None:
        wanted = Wanted(((8,), (4, 6)), ("x", "all"), (1, 2), ("f4",), (3,))
        names = [case.name for case in cases(wanted)]
        assert len(names) == 8 and "4x6 f4 all halo 2 3 fields" in names

    def test_bytes(self) -> None:
        case = milc((4, 6, 8, 10))
        near = Neighbourhood(case, places(case, 2), 0)
        # Two x-faces of su3 vectors go to the other rank, the rest stay here.
        assert near.bytes_sent == 2 * 4 * 6 * 8 * 24
        assert sum(piece.box.nbytes for piece in near.sends) == 48 * (
            6 * 8 * 10 + 4 * 8 * 10 + 4 * 6 * 10 + 4 * 6 * 8
        )

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (((8, 8), "z"), "x, y, faces, all"),
            (((8, 2), "x", 3), "wider than a block"),
            (((8,), "x", 1, "?"), "not one of numbers"),
            (((8,), "x", 1, "floaty"), "not one of numbers"),
        ],
    )
    def test_what_is_no_exchange(self, arguments: tuple[Any, ...], text: str) -> None:
        with pytest.raises(HaloxError, match=text):
            ExchangeCase(*arguments)


def row(kind: str, name: str, us: float | None, **others: Any) -> ExchangeRow:
    common = ((8, 8, 8), (), (1, 1, 2), "x", 1, "f8", 1, 1024)
    return ExchangeRow(*common, case="8^3 f8 x", kind=kind, name=name, us=us, **others)


class TestRows:
    def test_chosen_over_best(self) -> None:
        rows = [
            row("selected", "selected", 12.0, path="staged/shared"),
            row("path", "staged", 11.0, path="staged/shared"),
            row("path", "peer", 10.0, path="peer/ll"),
            row("path", "ipc", None, error="no"),
            row("baseline", "by hand", 5.0),
            row("selected", "selected", 8.0, mode="graph", path="peer/ll"),
            row("path", "peer", 4.0, mode="graph", path="peer/ll"),
        ]
        result: dict[str, Any] = {}
        said = "\n".join(choices(rows, result))
        streamed, graph = result["chosen_over_best"]["cases"]
        assert streamed["best"] == "peer" and streamed["ratio"] == 1.2 and not streamed["same"]
        assert graph["ratio"] == 2.0 and graph["same"]
        assert result["chosen_over_best"]["share_within"] == 0.5
        assert "50.0 % of 2" in said and "worst 1.20 x" in said
        assert choices(rows[:1], result) == []
        assert result["chosen_over_best"]["share_within"] is None

    def test_lines_are_aligned(self) -> None:
        shown = line(row("baseline", "by hand", 123.456), 12.3456)
        assert shown.index("by hand") == header().index("method")
        assert shown.endswith("0.10 x")
        assert line(row("path", "ipc", None, error="no\nmore"), None).endswith("  no")
        broken = row("path", "ipc", None, error="why", failed=True)
        assert line(broken, None).endswith("FAILED: why")

    def test_plots(self, tmp_path: Path) -> None:
        rows = [row("selected", "selected", 3.0, path="peer/ll"), row("path", "peer", 3.0)]
        larger = [replace(r, shape=(16,) * 3, case="16") for r in rows]
        drawn = exchange_plots.draw([*rows, *larger], tmp_path / "new")
        names = [path.name for path in drawn]
        assert names == ["exchange-3d-x-f8-halo1-fields1.png", "chosen-over-best.png"]
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("n", [1, 2, 17, 64])
class TestPingPong:
    def test_types_travel_as_slicing_says(self, pattern: str, n: int) -> None:
        (case,) = select([pattern], [n])
        arrays = [np.zeros(side.elements) for side in case.sides]
        oracles = [PingPongOracle(case, player) for player in (0, 1)]
        for player in (0, 1):
            oracles[player].fill(arrays[player], 3, full=player == 0)
        assert oracles[0].wrong(arrays[0], 3) == 0
        assert oracles[1].wrong(arrays[1], 3) == case.nbytes // 8
        packed = np.zeros(case.nbytes, np.uint8)
        HostPacker(arrays[0], case.sides[0].datatype, case.sides[0].count).pack(packed)
        HostPacker(arrays[1], case.sides[1].datatype, case.sides[1].count).unpack(packed)
        assert oracles[1].wrong(arrays[1], 3) == 0
        assert oracles[1].wrong(arrays[1], 4) == case.nbytes // 8
        arrays[1][-1] += 0.25
        assert oracles[1].wrong(arrays[1], 3) == 1

    def test_packing_by_hand_is_the_same(self, pattern: str, n: int) -> None:
        (case,) = select([pattern], [n])
        for side in case.sides:
            array = np.random.default_rng(n).random(side.elements)
            packed, wanted = (np.zeros(case.nbytes, np.uint8) for _ in range(2))
            HostPacker(array, side.datatype, side.count).pack(wanted)
            side.by_hand.pack([array.view(np.uint8)], packed)
            assert np.array_equal(packed, wanted)
            target, other = np.zeros_like(array), np.zeros_like(array)
            side.by_hand.unpack([target.view(np.uint8)], packed)
            HostPacker(other, side.datatype, side.count).unpack(packed)
            assert np.array_equal(target, other)


def test_transposing() -> None:
    (case,) = select(["transpose"], [3])
    matrix, turned = np.arange(9.0), np.zeros(9)
    packed = np.zeros(72, np.uint8)
    HostPacker(matrix, case.sides[0].datatype).pack(packed)
    HostPacker(turned, case.sides[1].datatype).unpack(packed)
    assert np.array_equal(turned.reshape(3, 3), matrix.reshape(3, 3).T)


class TestCommands:
    def test_exchange_on_two_ranks(self, tmp_path: Path) -> None:
        file = tmp_path / "rows.json"
        ended = halox_bench(
            *("exchange", "-n", "2", "--device", "cpu", "--sizes", "6,12x10x8"),
            *("--faces", "x,all", "--fields", "1,2", "--repeats", "1"),
            *("--json", str(file), "--plot", str(tmp_path / "plots")),
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        result = json.loads(file.read_text())
        assert result["machine"]["ranks"] == 2 and result["machine"]["mpi4py"]
        rows = result["rows"]
        assert len({r["case"] for r in rows}) == 8
        names = {
            "selected",
            "host",
            "scatter_gather",
            "packed by hand, Isend/Irecv",
            "mpi4py types, Isend/Irecv",
            "mpi4py types, Neighbor_alltoallw",
        }
        assert {r["name"] for r in rows} == names and len(rows) == 8 * 6
        assert all(r["us"] > 0 and r["checked"] and not r["error"] for r in rows)
        assert all(r["mode"] == "stream" and len(r["beside"]) == 3 for r in rows)
        for r in rows:
            by = "scatter_gather" if r["name"] == "scatter_gather" else "host"
            assert r["kind"] == "baseline" or r["path"].startswith(f"{by}/")
        (face,) = {r["bytes_each_way"] for r in rows if r["case"] == "12x10x8 f8 x"}
        assert face == 2 * 12 * 10 * 8
        compared = result["chosen_over_best"]
        assert len(compared["cases"]) == 8 and 0 <= compared["share_within"] <= 1
        assert "chosen path over best path" in ended.stdout
        assert list((tmp_path / "plots").glob("exchange-3d-x-*.png"))

    @pytest.mark.full
    def test_pingpong_on_two_ranks(self, tmp_path: Path) -> None:
        file = tmp_path / "rows.json"
        ended = halox_bench(
            *("pingpong", "--where", "host", "--sizes", "4,33", "--repeats", "1"),
            *("--json", str(file), "--plot", str(tmp_path / "plots")),
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        rows = json.loads(file.read_text())["rows"]
        assert {(r["pattern"], r["n"]) for r in rows} == {(p, n) for p in PATTERNS for n in (4, 33)}
        ours = {"selected", "host", "scatter_gather"}
        names = {*ours, pingpong_baselines.MPI_TYPES, pingpong_baselines.BY_HAND}
        assert {r["name"] for r in rows} == names
        for r in rows:
            assert r["checked"] and r["half_us"] > 0 and not r["error"]
            assert np.isclose(r["gb_per_s"], r["nbytes"] / r["half_us"] / 1e3)
        assert {r["nbytes"] for r in rows if r["pattern"] == "triangle"} == {80, 33 * 34 * 4}
        assert len(list((tmp_path / "plots").glob("pingpong-*.png"))) == 4

    def test_ddtbench_on_two_ranks(self, tmp_path: Path) -> None:
        file = tmp_path / "rows.json"
        ended = halox_bench(
            *("ddtbench", "--where", "host", "--patterns", "NAS_LU_?/12,SPECFEM3D_oc/c1"),
            *("--repeats", "1", "--json", str(file), "--plot", str(tmp_path / "plots")),
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        rows = json.loads(file.read_text())["rows"]
        sizes = {"NAS_LU_x/12": 480, "NAS_LU_y/12": 480, "SPECFEM3D_oc/c1": 1972}
        assert {r["case"]: r["nbytes"] for r in rows} == sizes and len(rows) == 8 * len(sizes)
        for r in rows:
            assert r["checked"] and r["half_us"] > 0 and r["name"] in ended.stdout
            assert np.isclose(r["gb_per_s"], r["nbytes"] / r["half_us"] / 1e3)
        assert len(list((tmp_path / "plots").glob("ddtbench-*-host.png"))) == 3

    @pytest.mark.full
    def test_scatter_gather_on_two_ranks(self, tmp_path: Path) -> None:
        file = tmp_path / "rows.json"
        ended = halox_bench(
            *(
                "scatter_gather",
                "--where",
                "host",
                "--patterns",
                "vector-1KiB/[13]*,SPECFEM3D_mt/*x32",
            ),
            *("--repeats", "1", "--json", str(file), "--plot", str(tmp_path / "plots")),
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        rows = json.loads(file.read_text())["rows"]
        sizes = {f"vector-1KiB/{n}": 1024 * n for n in (16, 32, 128)}
        sizes["SPECFEM3D_mt/1024x2x32"] = 4096 * 32
        assert {r["case"]: r["nbytes"] for r in rows} == sizes
        for r in rows:
            assert r["checked"] and r["half_us"] > 0 and r["name"] in ended.stdout
        names = {r["name"] for r in rows}
        assert {
            "selected",
            "host",
            pingpong_baselines.MPI_TYPES,
            pingpong_baselines.BY_HAND,
        } <= names
        # Where the kernel does not let them, the path is left out.
        left = "host: left out: scatter_gather: " in ended.stdout
        assert left != ("scatter_gather" in names) == ("scatter_gather, no key cache" in names)
        assert len(list((tmp_path / "plots").glob("scatter_gather-*-host.png"))) == 2

    def test_list_of_scatter_gather(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["bench", "scatter_gather", "--list", "--quick"]) == 0
        assert "NAS_MG_y/512x66x66" in capsys.readouterr().out.splitlines()

    def test_list_of_ddtbench(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["bench", "ddtbench", "--list"]) == 0
        out = capsys.readouterr().out.splitlines()
        assert len(out) == 16 and "LAMMPS_atomic: 4084-243 2157-145 1217-114" in out

    def test_one_rank_in_this_process(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        require("mpi")
        words = "bench exchange --device cpu --sizes 5 --faces all --repeats 1 --no-baselines"
        assert main([*words.split(), "--json", str(tmp_path / "x.json")]) == 0
        rows = json.loads((tmp_path / "x.json").read_text())["rows"]
        assert [r["bytes_each_way"] for r in rows] == [0, 0, 0]
        assert "5^3 f8 all" in capsys.readouterr().out

    def test_targets_of_numpy_arrays(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        require("mpi")
        monkeypatch.setattr(targets_host, "SHAPES", ((6, 5), (3, 4, 5)))
        monkeypatch.setattr(targets_host, "TIMING", Timing(batches=1, batch_s=1e-5))
        assert main(["bench", "exchange", "--targets", "--device", "cpu"]) == 0
        out = capsys.readouterr().out
        assert out.count(">= 1.0") == 2 and out.count("the same by grid.exchange") == 2
        assert "3x4x5 float64 a rank, all neighbours, 1x1x1 ranks" in out
        assert [case.proc_shape(2) for case in targets_host.cases(2)] == [
            (2, 1),
            (1, 2),
            (2, 1, 1),
            (1, 1, 2),
        ]

    def test_a_wrong_exchange_has_no_speed(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        require("mpi")
        monkeypatch.setattr(targets_host, "SHAPES", ((6, 5),))
        monkeypatch.setattr(baselines.ByHand, "__call__", lambda self: None)
        assert main(["bench", "exchange", "--targets", "--device", "cpu"]) == 1
        assert "wrong result" in capsys.readouterr().out

    def test_list(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["bench", "exchange", "--list"]) == 0
        out = capsys.readouterr().out.splitlines()
        assert "768^3 f8 x" in out and "16x16x16x8 c8[3] faces" in out

    @pytest.mark.parametrize(
        ("words", "text"),
        [
            ("exchange --sizes 0", "at least 1"),
            ("exchange --sizes 8x8 --faces z", "expected one of x, y, faces, all"),
            ("exchange --sizes 8 --halo 9", "wider than a block"),
            ("exchange --sizes 1x2x3x4x5", "1 to 4 axes"),
            (
                "exchange --paths host,carrier",
                "there is no path 'carrier' between ranks; known are",
            ),
            ("pingpong --paths local", "there is no path 'local'"),
            ("transpose --paths staged/pigeon", "known are staged/shared, staged/mpi"),
            ("exchange --device cpu --sizes 4 --json /no/such/x.json", "no such folder"),
            ("pingpong --patterns spiral", "known are vector"),
            ("pingpong --where moon", "host, 1gpu, 2gpus"),
            ("ddtbench --where moon", "host, 1gpu, 2gpus"),
            ("ddtbench --patterns spiral", "known are"),
            ("ddtbench --patterns vector", "no pattern is called 'vector'; known are WRF_x_vec"),
            ("ddtbench --patterns FFT2/100", "its sizes: 256, 512"),
            ("scatter_gather --where moon", "host, 1gpu, 2gpus"),
            ("scatter_gather --patterns vector", "matches nothing; known are vector-1KiB"),
        ],
    )
    def test_wrong_command_lines(
        self, words: str, text: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        require("mpi")
        try:
            status = main(["bench", *words.split()])
        except SystemExit as ended:
            status = ended.code  # type: ignore[assignment]
        assert status == 2
        assert text in capsys.readouterr().err

    def test_a_path_that_is_not_possible_says_why(self) -> None:
        ended = halox_bench(
            *("exchange", "-n", "2", "--device", "cpu", "--sizes", "4", "--faces", "x"),
            *("--paths", "host,peer", "--repeats", "1", "--no-baselines"),
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        (refused,) = [text for text in ended.stdout.splitlines() if " peer " in text]
        assert "FAILED" not in refused and "these arrays are NumPy" in refused

    def test_errors_of_all_ranks_are_told_once(self) -> None:
        ended = halox_bench("exchange", "-n", "2", "--device", "cpu", "--json", "/no/such/x.json")
        assert ended.returncode == 2
        assert ended.stderr.count("there is no such folder as /no/such") == 1
        assert "Traceback" not in ended.stderr
