"""The transpose benchmark between ranks: every method is right, and a wrong result is never timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from halox.errors import PathError
from halox_bench.ranks.bench import Options
from halox_bench.ranks.clock import Timing
from halox_bench.transpose import baselines, baselines_gpu
from halox_bench.transpose.baselines import (
    ALLTOALLW,
    ALLTOALLW_COPYTO,
    COPY,
    COPYTO,
    Turning,
)
from halox_bench.transpose.cases import TransposeCase
from halox_bench.transpose.kind import of_copy
from halox_bench.transpose.oracle import TransposeOracle
from halox_bench.transpose.pieces import Pieces
from halox_bench.transpose.run import TransposeBench
from tests.mpi.bench_nccl import Nccl
from tests.unit import bench_gpu

pytestmark = [pytest.mark.ranks(1, 2, 3, 4), pytest.mark.usually(2)]

OPTIONS = Options("cpu", timing=Timing(batches=1, batch_s=1e-5))

DIVIDED = [
    TransposeCase((5, 7), (1, 0), "u1", division="slabs"),
    TransposeCase((4, 5, 6), (0, 1, 2), "c16", (), "slabs", "backward"),
    TransposeCase((4, 5, 6), (1, 2, 0), "f4", (3,), "slabs", "forward"),
    TransposeCase((4, 5, 6), (2, 1, 0), "u2", (), "pencils", "backward"),
    TransposeCase((4, 5, 6), (0, 2, 1), "f8", (), "pencils", "forward"),
    TransposeCase((4, 6, 5, 7), (2, 0, 3, 1), "f8", (2,), "pencils", "backward"),
]

WHOLE = [
    TransposeCase((5, 7), (1, 0), "f4", (), "whole", "forward", "vector"),
    TransposeCase((5, 7), (1, 0), "c16", (3,), "whole", "backward", "vector"),
    TransposeCase((4, 5, 6), (2, 0, 1), "u1", (2,), "whole", "backward"),
    TransposeCase((4, 3, 5, 2), (3, 1, 0, 2), "f8"),
]


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("case", DIVIDED, ids=lambda case: case.name)
def test_every_method_is_right(case: TransposeCase, comm: MPI.Intracomm) -> None:
    rows = TransposeBench(comm, OPTIONS).measure(case)
    natural = case.axes == tuple(range(case.ndim))
    by_mpi = [ALLTOALLW] if natural else [ALLTOALLW, ALLTOALLW_COPYTO]
    assert [row.name for row in rows] == ["selected", "host", "scatter_gather", COPY, *by_mpi]
    for row in rows:
        assert row.checked and row.us is not None and row.us > 0, row.error
        assert set(row.beside) == {COPY, *by_mpi} and of_copy(row)
    figures = [(row.us, row.nbytes, row.bytes_sent) for row in rows]
    assert comm.allgather(figures) == [figures] * comm.size, "one figure for all ranks"
    assert rows[0].bytes_sent > 0


@pytest.mark.ranks(1)
@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.name)
def test_every_method_on_one_rank_is_right(case: TransposeCase, comm: MPI.Intracomm) -> None:
    rows = TransposeBench(comm, OPTIONS).measure(case)
    assert [row.name for row in rows] == ["selected", COPY, COPYTO]
    assert all(row.checked and row.us for row in rows), [row.error for row in rows]
    assert rows[0].nbytes == case.nbytes and rows[0].bytes_sent == 0


def fitting(comm: MPI.Intracomm) -> TransposeCase:
    division = "whole" if comm.size == 1 else "slabs"
    return TransposeCase((12, 9, 10), (2, 1, 0), "f8", division=division)


@pytest.mark.parametrize("name", [COPY, "turned"])
def test_one_wrong_value_on_one_rank_leaves_no_figure(
    name: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    turning: Any = baselines.CopyTo if comm.size == 1 else baselines.Alltoallw
    spoilt_one = baselines.HostCopy if name == COPY else turning
    right: Callable[[Any], None] = spoilt_one.__call__

    def wrong(self: Any) -> None:
        right(self)
        if comm.rank == comm.size - 1 and type(self) is spoilt_one:
            self.arrays[1][-1, -1, -1] += 1

    monkeypatch.setattr(spoilt_one, "__call__", wrong)
    rows = TransposeBench(comm, OPTIONS).measure(fitting(comm))
    (spoilt,) = [row for row in rows if row.failed]
    assert spoilt.name == spoilt_one.name and spoilt.us is None and not spoilt.checked
    assert "wrong result: 1 values, in transpose 1" in spoilt.error
    assert all(row.us and spoilt.name not in row.beside for row in rows if row is not spoilt)


def elementwise_binary(
    alpha: float, source: Any, modes: Any, gamma: float, old: Any, to: Any, out: Any
) -> None:
    """In the place of cuTENSOR's: by einsum."""
    out[...] = alpha * np.einsum(source, list(modes), list(to)) + gamma * old


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cp = bench_gpu.fake_cupy(1 << 18)
    cp.empty = lambda shape, dtype: bench_gpu.empty(int(np.prod(shape)), dtype).reshape(shape)
    cp.empty_like = lambda array: cp.empty(array.shape, array.dtype)
    cp.cuda.get_current_stream = lambda: bench_gpu.Stream()
    cp.cuda.runtime.memcpyDeviceToDevice = 3
    monkeypatch.setattr(baselines_gpu, "cupy", lambda: cp)
    module = SimpleNamespace(elementwise_binary=elementwise_binary)
    monkeypatch.setitem(sys.modules, "cupyx.cutensor", module)  # type: ignore[arg-type]


def placed(case: TransposeCase, comm: MPI.Intracomm) -> tuple[Pieces, list[Any], TransposeOracle]:
    """Pieces, arrays in the memory of the GPU, and the oracle of a case on these ranks."""
    blocks = []
    shapes = case.shape, case.turned_shape
    for shape, parts in zip(shapes, case.proc_shapes(comm.size), strict=True):
        cuts = [[n * i // p for i in range(p + 1)] for n, p in zip(shape, parts, strict=True)]
        blocks.append(
            [
                tuple(slice(cut[c], cut[c + 1]) for cut, c in zip(cuts, at, strict=True))
                for at in np.ndindex(*parts)
            ]
        )
    source, target = blocks[::-1] if case.backward else blocks
    pieces = Pieces(source, target, case.source_axes, comm.rank)
    arrays = []
    for block in (pieces.source, pieces.target):
        shape = (*(part.stop - part.start for part in block), *case.components)
        arrays.append(bench_gpu.empty(int(np.prod(shape)), case.dtype).reshape(shape))
    return pieces, arrays, TransposeOracle(case, pieces.source, pieces.target)


def expect_right(made: Turning, oracle: TransposeOracle, comm: MPI.Intracomm) -> None:
    for step in range(3):
        oracle.fill(*made.arrays, step)
        made()
        source, target = made.arrays
        wrong = int((source != target).sum()) if made.name == COPY else oracle.wrong(target, step)
        assert comm.allreduce(wrong) == 0
    made.close()


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("case", DIVIDED, ids=lambda case: case.name)
def test_nccl(case: TransposeCase, comm: MPI.Intracomm, on_gpu: None) -> None:
    pieces, arrays, oracle = placed(case, comm)
    made = baselines_gpu.ByNccl(Nccl(comm), case, pieces, arrays)  # type: ignore[arg-type]
    expect_right(made, oracle, comm)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", ["StridedCopy", "Cutensor"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("shape", "axes"), [((33, 40), (1, 0)), ((5, 33, 4), (2, 1, 0)), ((5, 6, 7), (1, 2, 0))]
)
def test_on_one_gpu(
    shape: Any, axes: Any, direction: str, name: str, comm: MPI.Intracomm, on_gpu: None
) -> None:
    case = TransposeCase(shape, axes, "f8", (), "whole", direction)
    _, arrays, oracle = placed(case, comm)
    expect_right(getattr(baselines_gpu, name)(case, arrays), oracle, comm)
    expect_right(baselines_gpu.DeviceCopy(arrays), oracle, comm)


@pytest.mark.ranks(1)
def test_no_cutensor(comm: MPI.Intracomm, on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    case = TransposeCase((4, 5), (1, 0), "u1")
    _, arrays, _ = placed(case, comm)
    with pytest.raises(PathError):
        baselines_gpu.Cutensor(case, arrays)
    monkeypatch.setitem(sys.modules, "cupyx.cutensor", None)
    with pytest.raises(PathError):
        baselines_gpu.Cutensor(case, arrays)
