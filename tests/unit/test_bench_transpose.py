"""``halox bench transpose``: cases, pieces, the check of results, the tile by hand, rows, targets, the command."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import halox
from halox.cli import main
from halox.decomposition import decompose
from halox.errors import HaloxError, PathError
from halox.runtime.gpu.compiler import preamble
from halox_bench.common import kernels
from halox_bench.ranks.bench import Options
from halox_bench.ranks.clock import Stage, Timing
from halox_bench.ranks.methods import WrongResult
from halox_bench.transpose import fft, plots, targets
from halox_bench.transpose.baselines import ALLTOALLW, ALLTOALLW_COPYTO, CONTIGUOUS, COPY, COPYTO
from halox_bench.transpose.baselines_gpu import CUPY, NCCL, THREADS, TILE
from halox_bench.transpose.cases import (
    DIRECTIONS,
    DIVISIONS,
    METHODS,
    TransposeCase,
    Wanted,
    axes_of,
    cases,
    orders,
)
from halox_bench.transpose.oracle import TransposeOracle
from halox_bench.transpose.pieces import Pieces
from halox_bench.transpose.rows import TransposeRow, header, line
from halox_bench.transpose.run import TransposeBench, columns
from halox_bench.transpose.tiling import tiling
from tests.support import halox_bench, require
from tests.unit import bench_gpu
from tests.unit.cpu_kernels import SHIM, shared_library
from tests.unit.lone_rank import alone

CASES = [
    TransposeCase((5, 7), (1, 0), "u1", division="slabs"),
    TransposeCase((5, 7), (0, 1), "c16", (3,), "slabs", "backward"),
    TransposeCase((4, 5, 6), (1, 2, 0), "f4", division="slabs"),
    TransposeCase((4, 5, 6), (2, 1, 0), "u2", (2,), "pencils", "backward"),
    TransposeCase((4, 6, 5, 7), (2, 0, 3, 1), "f8", (), "pencils"),
]


def blocks_of(case: TransposeCase, ranks: int) -> tuple[list[Any], list[Any]]:
    """Blocks of all ranks on the source's side and on the target's."""
    sides = []
    shapes = case.shape, case.turned_shape
    for shape, parts in zip(shapes, case.proc_shapes(ranks), strict=True):
        domain = decompose(shape, ranks, halo=0, periodic=False, proc_shape=parts)
        bounds = [[axis.bounds for axis in domain.axes], domain]
        found = []
        for rank in range(ranks):
            coords = domain.coords_of(rank)
            cuts = zip(bounds[0], coords, strict=True)
            found.append(tuple(slice(int(cut[c]), int(cut[c + 1])) for cut, c in cuts))
        sides.append(found)
    first, second = sides
    return (second, first) if case.backward else (first, second)


def shape_of(block: Any, case: TransposeCase) -> tuple[int, ...]:
    return (*(part.stop - part.start for part in block), *case.components)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
class TestDivided:
    def filled(self, case: TransposeCase, ranks: int) -> Any:
        """Oracles and arrays of all ranks, and what NumPy's transpose of the whole makes of them."""
        source, target = blocks_of(case, ranks)
        oracles = [TransposeOracle(case, *both) for both in zip(source, target, strict=True)]
        whole = np.zeros(
            (*(case.turned_shape if case.backward else case.shape), *case.components), case.dtype
        )
        befores, afters = [], []
        for block, other, oracle in zip(source, target, oracles, strict=True):
            before = np.zeros(shape_of(block, case), case.dtype)
            oracle.fill(before, np.zeros(shape_of(other, case), case.dtype), 1)
            whole[block] = before
            befores.append(before)
        axes = case.source_axes
        turned = np.transpose(whole, (*axes, *range(case.ndim, case.ndim + len(case.components))))
        afters = [turned[block].copy() for block in target]
        return oracles, befores, afters, source, target

    def test_oracle_is_numpy_s_transpose(self, case: TransposeCase, ranks: int) -> None:
        oracles, _, afters, *_ = self.filled(case, ranks)
        for oracle, after in zip(oracles, afters, strict=True):
            assert oracle.wrong(after, 1) == 0
            assert oracle.wrong(after, 2) == after.size, "values of the last transpose are wrong"
            flat = after.reshape(-1)
            for at in range(0, flat.size, max(1, flat.size // 20)):
                flat[at] += 1
                assert oracle.wrong(after, 1) == 1
                flat[at] -= 1

    def test_nothing_right_is_left_in_the_target(self, case: TransposeCase, ranks: int) -> None:
        oracles, befores, afters, *_ = self.filled(case, ranks)
        for oracle, before, after in zip(oracles, befores, afters, strict=True):
            oracle.fill(before, after, 3)
            assert oracle.wrong(after, 3) == after.size

    def test_pieces_carry_every_cell(self, case: TransposeCase, ranks: int) -> None:
        oracles, befores, afters, source, target = self.filled(case, ranks)
        pieces = [Pieces(source, target, case.source_axes, rank) for rank in range(ranks)]
        behind = range(case.ndim, case.ndim + len(case.components))
        for rank, oracle in enumerate(oracles):
            made = np.full_like(afters[rank], 0)
            for piece in pieces[rank].receives:
                (sent,) = [p for p in pieces[piece.peer].sends if p.peer == rank]
                part = befores[piece.peer][sent.box]
                made[piece.box] = part.transpose(*case.source_axes, *behind)
                assert piece.peer in pieces[rank].together
            assert oracle.wrong(made, 1) == 0
            sent_to_others = sum(p.cells for p in pieces[rank].sends if p.peer != rank)
            assert pieces[rank].cells_sent == sent_to_others


class TestCases:
    def test_the_whole_grid_of_cases(self) -> None:
        found = cases(Wanted())
        assert len({case.name for case in found}) == len(found) > 200
        alone = [case for case in found if case.division == "whole" and case.method == "transpose"]
        for ndim in (2, 3, 4):
            natural = set(orders(ndim)) if ndim > 2 else {(1, 0)}
            assert {case.axes for case in alone if case.ndim == ndim} == natural
        assert {case.element_bytes for case in alone} >= {1, 2, 4, 8, 16, 24, 64}
        assert {case.method for case in found} == set(METHODS)
        assert {case.division for case in found} == set(DIVISIONS)
        assert {case.direction for case in found} == set(DIRECTIONS)
        assert TransposeCase((8192, 8192), (1, 0), "f4", method="vector") in found
        assert TransposeCase((256, 384, 512), (2, 1, 0), "c16", direction="backward") in found
        assert 5 < len(cases(Wanted(), quick=True)) < 60

    def test_combinations(self) -> None:
        wanted = Wanted(((8, 6), (4, 5, 6)), (), ("f4", "u1"), (3,), ("whole",), ("forward",))
        names = [case.name for case in cases(wanted)]
        assert "8x6 f4[3] vector pack" in names and "4x5x6 u1[3] axes 210 forward" in names
        assert len(names) == 2 * (2 + 2 + 6)
        some = cases(Wanted(axes=((2, 0, 1),)), quick=True)
        assert {case.shape for case in some} == {(64, 96, 128)}

    def test_divisions(self) -> None:
        for axes, ranks in product(orders(4), (1, 2, 3, 4, 6, 8)):
            for division in ("slabs", "pencils"):
                case = TransposeCase((8,) * 4, axes, division=division)
                first, second = case.proc_shapes(ranks)
                assert np.prod(first) == np.prod(second) == ranks
                cut = {axis for axis, n in enumerate(first) if n > 1}
                after = {axes[k] for k, n in enumerate(second) if n > 1}
                assert ranks == 1 or cut != after, "something moves"
                kept = {0} if division == "pencils" and ranks in (4, 6, 8) else set()
                assert cut & after == kept

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (((4, 5), (0, 2)), "expected an order of 01"),
            (((4,), (0,)), "2 to 4 axes"),
            (((4, 5), (1, 0), "?"), "not one of numbers"),
            (((4, 5), (1, 0), "f8", (), "bricks"), "one of whole, slabs, pencils"),
            (((4, 5), (1, 0), "f8", (), "pencils"), "3 or 4 axes"),
            (((4, 5), (0, 1), "f8", (), "whole", "forward", "vector"), "whole matrix"),
        ],
    )
    def test_no_transposes(self, arguments: tuple[Any, ...], text: str) -> None:
        with pytest.raises(HaloxError, match=text):
            TransposeCase(*arguments)

    def test_wrong_wishes(self) -> None:
        with pytest.raises(HaloxError, match="no order of 2 axes"):
            cases(Wanted(sizes=((4, 5),), axes=((0, 2, 1),)))
        with pytest.raises(HaloxError, match="nothing to measure"):
            cases(Wanted(sizes=((4, 5, 6),), methods=("vector",)))
        with pytest.raises(HaloxError, match="as in 10,021"):
            axes_of(("xy",))


@pytest.mark.parametrize("method", ["vector", "hvector"])
@pytest.mark.parametrize(("dtype", "components"), [("u1", ()), ("f4", (3,)), ("c16", ())])
def test_datatypes_are_of_the_transposed_matrix(
    method: str, dtype: str, components: tuple[int, ...]
) -> None:
    case = TransposeCase((5, 7), (1, 0), dtype, components, method=method)
    matrix = np.arange(35 * int(np.prod(components))).reshape(5, 7, *components).astype(dtype)
    packed = halox.pack(matrix, *columns(case)).view(dtype).reshape(7, 5, *components)
    assert np.array_equal(packed, matrix.swapaxes(0, 1))


@cache
def tile_library(element_bytes: int) -> ctypes.CDLL:
    text = kernels.source("tile", "halox_bench.transpose")
    settings = preamble(kernels.defines("tile", ELEMENT_BYTES=element_bytes))
    return shared_library(f'{settings}#include "{SHIM}"\n{text}\n{bench_gpu.TILE}', "-O1")


TILED = [
    ((1, 1), (1, 0)),
    ((32, 64), (1, 0)),
    ((33, 70), (1, 0)),
    ((5, 33, 31), (0, 2, 1)),
    ((5, 33, 31), (2, 1, 0)),
    ((5, 33, 31), (1, 2, 0)),
    ((5, 33, 31), (2, 0, 1)),
    ((3, 5, 34, 6), (0, 1, 3, 2)),
    ((3, 5, 34, 6), (2, 3, 0, 1)),
    ((3, 5, 34, 6), (3, 1, 2, 0)),
]


@pytest.mark.parametrize("dtype", ["u1", "u2", "f4", "f8", "c16"])
@pytest.mark.parametrize(("shape", "axes"), TILED)
def test_tile_by_hand(shape: tuple[int, ...], axes: tuple[int, ...], dtype: str) -> None:
    require("cxx")
    item = np.dtype(dtype).itemsize
    found = tiling(shape, axes, item)
    source = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    guarded = np.full(source.size + 2, 99, dtype)
    target = guarded[1:-1].reshape([shape[axis] for axis in axes])
    pitches = found.from_pitch, found.to_pitch, found.from_batch, found.to_batch
    tile_library(item).run_tile(
        *map(ctypes.c_uint, (found.blocks, THREADS)),
        *map(ctypes.c_uint64, (source.ctypes.data, target.ctypes.data)),
        *map(ctypes.c_uint, (found.rows, found.columns)),
        *map(ctypes.c_uint64, pitches),
    )
    assert np.array_equal(target, source.transpose(axes))
    assert guarded[0] == 99 and guarded[-1] == 99


@pytest.mark.parametrize(
    ("shape", "axes", "nbytes", "text"),
    [
        ((4, 5, 6), (1, 0, 2), 8, "does not stay the last"),
        ((4, 5), (0, 1), 8, "does not stay the last"),
        ((4, 5, 6, 7), (3, 2, 1, 0), 8, "two axes and one"),
        ((4, 5), (1, 0), 24, "not of 24"),
    ],
)
def test_no_tile(shape: Any, axes: Any, nbytes: int, text: str) -> None:
    with pytest.raises(PathError, match=text):
        tiling(shape, axes, nbytes)


def row(kind: str, name: str, us: float | None, **others: Any) -> TransposeRow:
    what = ((8, 4), (1, 0), "f4", (), "whole", "forward", "transpose", ((1, 1), (1, 1)))
    case = TransposeCase((8, 4), (1, 0), "f4").name
    return TransposeRow(*what, 128, 0, case=case, kind=kind, name=name, us=us, **others)


class TestRows:
    def test_lines(self) -> None:
        shown = line(row("baseline", COPYTO, 4.0, beside={COPY: 3.0}), 2.0)
        assert shown.index(COPYTO) == header().index("method")
        assert shown.split()[-3:] == ["75.0", "0.50", "x"]
        assert line(row("baseline", TILE, None, error="no\nmore"), None).endswith("  no")
        assert row("selected", "selected", 2.0).of_copy is None

    def test_plots(self, tmp_path: Path) -> None:
        rows = [row("selected", "selected", 3.0), row("baseline", COPY, 2.0)]
        rows += [replace(one, nbytes=256, case="larger") for one in rows]
        (drawn,) = plots.draw([*rows, row("baseline", TILE, None)], tmp_path / "new")
        assert drawn.name == "transpose-transpose-10-whole-forward-f4.png"
        assert drawn.read_bytes().startswith(b"\x89PNG")


TIMES = {
    ("selected", "stream"): 12.0,
    ("selected", "graph"): 10.0,
    (COPY, "stream"): 9.5,
    (COPY, "graph"): 9.0,
    (CUPY, "graph"): 20.0,
    (NCCL, "graph"): 40.0,
    (ALLTOALLW, "stream"): 30.0,
    (ALLTOALLW_COPYTO, "stream"): 18.0,
    (COPYTO, "stream"): 24.0,
}


class FakeBench:
    """Rows with the times above."""

    def __init__(self, *, size: int = 1, shared: bool = False, graph: bool = True) -> None:
        self.shared_gpu, self.comm, self.graph = shared, alone(size), graph
        self.failed = ""

    def peer_bytes_per_us(self) -> float:
        return 1e5

    def measure(self, case: TransposeCase) -> list[TransposeRow]:
        found = []
        for (name, mode), us in TIMES.items():
            if mode == "graph" and not self.graph:
                continue
            if name == NCCL and (self.comm.size == 1 or self.shared_gpu):
                continue
            made = replace(
                row("selected" if name == "selected" else "baseline", name, us, mode=mode),
                case=case.name,
                bytes_sent=800_000,
            )
            if name == self.failed:
                made = replace(made, us=None, error="bad", failed=True)
            found.append(made)
        return [*found, row("baseline", TILE, None, error="no such order")]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    require("mpi")
    monkeypatch.delattr(halox, "FFT", raising=False)

    def run(measure: Any = targets.measure, **options: Any) -> dict[str, Any]:
        failed = options.pop("failed", "")
        bench = FakeBench(**options)
        bench.failed = failed
        monkeypatch.setattr(targets, "TransposeBench", lambda comm, options: bench)
        found = measure(bench.comm)
        json.dumps(found, allow_nan=False)
        names = [one["name"] for one in found]
        assert len(set(names)) == len(names)
        return {one["name"]: one for one in found}

    return run


class TestTargets:
    def test_one_gpu(self, figures: Callable[..., dict[str, Any]]) -> None:
        found = figures()
        assert len(found) == 2 * (3 + 5 + 2)
        assert all(one["value"] == 0.9 and one["baseline"] == 9.0 for one in found.values())
        wanted = {"f4": 0.80, "f8": 0.85, "c16": 0.90}
        for shape, dtype in targets.MATRICES:
            for what in ("pack", "unpack"):
                size = "x".join(map(str, shape))
                name = f"matrix transposed by a datatype, {size} {dtype} vector {what}, in a graph"
                one = found[f"{name}: share of a device copy's speed"]
                assert one["target"] == wanted[dtype] and one["met"]
        one = found[
            "Transpose of 256x384x512 c16 axes 210 backward, in a graph: share of a device copy's speed"
        ]
        assert one["target"] == 0.8 and one["us"] == 10.0 and one["others"][CUPY] == 20.0
        assert one["refused"] == {TILE: "no such order"}

    def test_what_cannot_be_captured_is_measured_in_a_stream(
        self, figures: Callable[..., dict[str, Any]]
    ) -> None:
        assert {one["us"] for one in figures(graph=False).values()} == {12.0}

    def test_two_gpus(self, figures: Callable[..., dict[str, Any]]) -> None:
        found = figures(size=2)
        what = "Transpose of 256x256x512 c16 axes {} slabs forward, 2 ranks, in a graph"
        one = found[what.format("210") + ": share of the measured speed of a copy to the peer"]
        assert one["value"] == 800_000 / 10 / 1e5 and one["target"] == 0.75 and one["met"]
        natural = found[what.format("012") + ": share of the measured speed of a copy to the peer"]
        assert natural["target"] is None
        assert found[what.format("120") + f": over {NCCL}"]["value"] == 0.25
        assert not any("pencils" in name for name in found)
        assert any("pencils" in name for name in figures(size=4))

    def test_ranks_that_share_a_gpu_have_no_targets(
        self, figures: Callable[..., dict[str, Any]]
    ) -> None:
        found = figures(size=2, shared=True, graph=False)
        assert found and all(one["met"] is None for one in found.values())

    def test_a_wrong_result_leaves_no_figures(self, figures: Callable[..., dict[str, Any]]) -> None:
        assert all("bad" in one["failed"] for one in figures(failed=CUPY).values())

    def test_host(self, figures: Callable[..., dict[str, Any]]) -> None:
        found = figures(targets.measure_on_host, size=4)
        what = "Transpose of 128x128x128 c16 axes 021 {} {}, 4 ranks, NumPy: times as fast as "
        one = found[what.format("pencils", "backward") + ALLTOALLW]
        assert one["value"] == 1.5 and one["target"] == 1.3 and one["met"]
        assert one["baseline_name"] == f"us of {ALLTOALLW_COPYTO}", "the better one counts"
        assert all(one["target"] is None for name, one in found.items() if "slabs" in name)
        one_rank = figures(targets.measure_on_host)
        assert {one["value"] for one in one_rank.values()} == {2.0}


class OwnFFT:
    """In the place of halox.FFT, on one rank: NumPy's."""

    spoil = ""

    def __init__(self, grid: Any) -> None:
        self.grid = grid

    def __enter__(self) -> OwnFFT:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def forward(self, u: Any, out: Any) -> None:
        out[...] = np.fft.fftn(u)
        if self.spoil == "forward":
            out[0, 0, 1] += 1

    def backward(self, s: Any, out: Any) -> None:
        out[...] = np.fft.ifftn(s)
        if self.spoil == "backward":
            out[0, 0, 1] += 1


class TestFFT:
    @pytest.fixture
    def bench(self) -> TransposeBench:
        require("mpi")
        from mpi4py import MPI

        return TransposeBench(MPI.COMM_SELF, Options("cpu", timing=Timing(1, 1e-5)))

    def test_times(self, bench: TransposeBench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(halox, "FFT", OwnFFT, raising=False)
        times = fft.times_us(bench, 8)
        assert set(times) == {fft.HALOX, fft.BACK, fft.PLAN} and min(times.values()) > 0

    @pytest.mark.parametrize("direction", ["forward", "backward"])
    def test_wrong_values_are_not_timed(
        self, direction: str, bench: TransposeBench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(halox, "FFT", OwnFFT, raising=False)
        monkeypatch.setattr(OwnFFT, "spoil", direction)
        with pytest.raises(WrongResult, match="the FFT is wrong"):
            fft.times_us(bench, 8)

    def test_is_among_the_targets_where_there_is_one(
        self, figures: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert not any("FFT" in name for name in figures())
        monkeypatch.setattr(halox, "FFT", OwnFFT, raising=False)
        times = {fft.HALOX: 11.0, fft.BACK: 12.0, fft.PLAN: 10.0}
        monkeypatch.setattr(fft, "times_us", lambda bench: times)
        forward, backward = (one for name, one in figures().items() if "FFT" in name)
        assert forward["value"] == 1.1 and forward["target"] == 1.15 and forward["met"]
        assert backward["value"] == 1.2 and backward["target"] is None


class TestCommand:
    def test_one_rank_in_this_process(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        require("mpi")
        file = tmp_path / "rows.json"
        words = "bench transpose --device cpu --sizes 6x5,4x5x6 --axes 10,021 --components 1,3"
        assert main([*words.split(), "--repeats", "1", "--json", str(file)]) == 0
        rows = json.loads(file.read_text())["rows"]
        names = {"selected", COPY, COPYTO, CONTIGUOUS}
        assert {r["name"] for r in rows} == names
        assert len({r["case"] for r in rows}) == 2 * 2 * (3 + 1)
        for r in rows:
            assert r["us"] > 0 and r["checked"] and set(r["beside"]) == names - {"selected"}
            assert r["bytes_sent"] == 0
        paths = {(r["method"], r["path"]) for r in rows if r["name"] == "selected"}
        assert {method for method, path in paths if path == "host"} == {"vector", "hvector"}
        assert {path for method, path in paths if method == "transpose"} == {"local/copy"}
        assert "4x5x6 f8[3] axes 021 backward" in capsys.readouterr().out

    def test_two_ranks(self, tmp_path: Path) -> None:
        file = tmp_path / "rows.json"
        ended = halox_bench(
            *("transpose", "-n", "2", "--device", "cpu", "--sizes", "6x5x4,12x10x8"),
            *("--axes", "012,210", "--repeats", "1", "--directions", "forward"),
            *("--divisions", "slabs"),
            *("--json", str(file), "--plot", str(tmp_path / "plots")),
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        rows = json.loads(file.read_text())["rows"]
        assert len({r["case"] for r in rows}) == 2 * 2
        for r in rows:
            assert r["us"] > 0 and r["checked"] and r["division"] != "whole"
            natural = r["axes"] == [0, 1, 2]
            wanted = {COPY, ALLTOALLW} | (set() if natural else {ALLTOALLW_COPYTO})
            assert set(r["beside"]) == wanted
        (sent,) = {
            r["bytes_sent"] for r in rows if r["case"] == "12x10x8 f8 axes 012 slabs forward"
        }
        assert sent == 6 * 5 * 8 * 8
        assert list((tmp_path / "plots").glob("transpose-*.png"))

    def test_targets_on_the_host(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        require("mpi")
        monkeypatch.setattr(targets, "ON_HOST", (6, 5, 4))
        monkeypatch.setattr(targets, "TIMING", Timing(1, 1e-5))
        file = tmp_path / "found.json"
        words = ["bench", "transpose", "--device", "cpu", "--targets", "--json", str(file)]
        assert main(words) == 0
        found = json.loads(file.read_text())["targets"]
        assert len(found) == 4 and all(one["value"] > 0 for one in found)
        assert "times as fast as np.copyto" in capsys.readouterr().out

    def test_list(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["bench", "transpose", "--list"]) == 0
        out = capsys.readouterr().out.splitlines()
        assert "8192x8192 f4 vector unpack" in out
        assert "256x256x512 c16 axes 210 pencils forward" in out

    @pytest.mark.parametrize(
        ("words", "text"),
        [
            ("--sizes 4x5 --axes 021", "no order of 2 axes"),
            ("--axes ab", "as in 10,021"),
            ("--sizes 4x5x6 --axes 012,013", "expected an order of 012"),
            ("--divisions bricks", "whole, slabs, pencils"),
            ("--device cpu --sizes 4x5 --divisions slabs", "whole arrays are for one rank"),
            ("--sizes 7", "2 to 4 axes"),
        ],
    )
    def test_wrong_command_lines(
        self, words: str, text: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        require("mpi")
        try:
            status = main(["bench", "transpose", *words.split()])
        except SystemExit as ended:
            status = ended.code  # type: ignore[assignment]
        assert status == 2
        assert text in capsys.readouterr().err

    def test_a_shape_with_fewer_cells_than_ranks_is_left_out(self) -> None:
        require("mpi")
        bench: Any = SimpleNamespace(comm=alone(4), stage=Stage())
        case = TransposeCase((2, 9), (1, 0), division="slabs")
        assert "cannot be divided" in TransposeBench._why_not(bench, case)
