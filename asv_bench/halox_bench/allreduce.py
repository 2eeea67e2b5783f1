"""``halox bench allreduce``: allreduces of all ranks, by every algorithm and by hand."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

import halox
from halox.errors import FieldError, HaloxError, PathError
from halox.reductions.algorithms import DEVICE_ALGORITHMS, HOST_ALGORITHMS
from halox.runtime.world import load_mpi
from halox_bench.bench import CHECKS, KIB, MIB, NAMED, Bench, Method, Plan, timed
from halox_bench.clock import Call
from halox_bench.kernels import copy, cupy, pinned
from halox_bench.kinds import Kind, Option, dtypes, size_label, sizes, words_of
from halox_bench.rows import BASELINE, SELECTED, Column, Row

BY_MPI, HOST_STAGED, NCCL = "MPI_Allreduce", "D2H + MPI_Allreduce + H2D", "NCCL"

SIZES = (*(4, 64, KIB, 8 * KIB, 64 * KIB, 256 * KIB), *(n * MIB for n in (1, 4, 16, 64, 128)))
QUICK_SIZES = (4, 8 * KIB, MIB)

_UFUNCS = {"sum": "add", "prod": "multiply", "min": "minimum", "max": "maximum"}
_NCCL_TYPES = {
    **{"i1": "INT8", "u1": "UINT8", "i4": "INT32", "u4": "UINT32", "i8": "INT64", "u8": "UINT64"},
    **{"f4": "FLOAT32", "f8": "FLOAT64"},
}


@dataclass(frozen=True)
class AllreduceCase:
    """Arrays of one number of elements, dtype and operation."""

    elements: int
    dtype: str = "f8"
    op: str = "sum"

    @property
    def nbytes(self) -> int:
        return self.elements * np.dtype(self.dtype).itemsize

    @property
    def details(self) -> dict[str, Any]:
        return {**vars(self), "nbytes": self.nbytes}

    @property
    def name(self) -> str:
        return f"{size_label(self.nbytes)} {self.dtype} {self.op}"


def cases(args: argparse.Namespace) -> list[AllreduceCase]:
    nbytes = args.sizes or (QUICK_SIZES if args.quick else SIZES)
    found = [
        AllreduceCase(max(1, size // np.dtype(dtype).itemsize), dtype, op)
        for dtype, op, size in product(args.dtype, args.op, nbytes)
    ]
    return list(dict.fromkeys(found))


class AllreduceOracle:
    """Fills arrays with small whole numbers, which any order combines exactly, and counts wrong results.

    The numbers of all ranks are combined by NumPy alone. They repeat after a prime number of elements, so that no part
    of an array that is cut by powers of two looks like another.
    """

    PERIOD = 65_521

    def __init__(self, case: AllreduceCase, rank: int, size: int, xp: Any = np) -> None:
        self._case, self._rank, self._size, self._xp = case, rank, size, xp

    def fill(self, source: Any, target: Any, step: int) -> None:
        """Give a rank its numbers of a step, and the result only wrong ones."""
        wanted = self._wanted(step)
        source[...] = self._spread(self._numbers(self._rank, step))
        target[...] = self._spread(wanted + wanted.dtype.type(1))

    def wrong(self, target: Any, step: int) -> int:
        """Count the wrong elements of a step's result."""
        return int(self._xp.count_nonzero(target != self._spread(self._wanted(step))))

    def _spread(self, numbers: npt.NDArray[Any]) -> Any:
        return self._xp.resize(self._xp.asarray(numbers), self._case.elements)

    def _wanted(self, step: int) -> npt.NDArray[Any]:
        combine = getattr(np, _UFUNCS[self._case.op])
        total = self._numbers(0, step)
        for rank in range(1, self._size):
            total = combine(total, self._numbers(rank, step)).astype(total.dtype)
        return total

    def _numbers(self, rank: int, step: int) -> npt.NDArray[Any]:
        dtype, op = np.dtype(self._case.dtype), self._case.op
        random = np.random.default_rng((rank, step))
        numbers: npt.NDArray[Any] = random.integers(0, 100, min(self._case.elements, self.PERIOD))
        if op == "prod":
            # Units and 2: a product is a power of 2, which floats hold exactly.
            factors = [1, 2, -1, 1j] if dtype.kind == "c" else [1, 2, 1, 2]
            numbers = np.array(factors)[numbers % 4]
        elif dtype.kind == "c":
            numbers = numbers % 4 + 1j * (numbers % 5)
        elif op == "sum":
            numbers = numbers % 16
        return numbers.astype(dtype)


def by_mpi(comm: Any, case: AllreduceCase, source: Any, target: Any) -> Method:
    op = getattr(load_mpi(), case.op.upper())
    return Method(lambda: comm.Allreduce(source, target, op), arrays=(source, target))


def host_staged(comm: Any, case: AllreduceCase, source: Any, target: Any) -> Method:
    """Return a copy into page-locked host memory, ``MPI_Allreduce`` there, and a copy back."""
    current, op = cupy().cuda.get_current_stream, getattr(load_mpi(), case.op.upper())
    pages = [pinned(case.nbytes) for _ in range(2)]
    host = [page.array.view(case.dtype) for page in pages]
    down = int(source.data.ptr), host[0].ctypes.data, case.nbytes
    up = host[1].ctypes.data, int(target.data.ptr), case.nbytes

    def call(keep: object = pages) -> None:
        stream = current()
        copy(*down, stream.ptr)
        stream.synchronize()
        comm.Allreduce(*host, op)
        copy(*up, stream.ptr)

    return Method(call, arrays=(source, target))


def by_nccl(bench: Bench, case: AllreduceCase, source: Any, target: Any) -> Method:
    """Return ``ncclAllReduce`` on the current stream; `PathError` if NCCL lacks the operation or the dtype."""
    nccl, dtype, count = bench.nccl(), np.dtype(case.dtype), case.elements
    if dtype.kind == "c" and case.op == "sum":
        # A sum of complex numbers is a sum of their parts.
        dtype, count = np.dtype(f"f{dtype.itemsize // 2}"), 2 * count
    kind = _NCCL_TYPES.get(f"{dtype.kind}{dtype.itemsize}")
    if kind is None:
        raise PathError(f"NCCL has no {case.op} of {case.dtype}")
    kinds = getattr(nccl.nccl, f"NCCL_{kind}"), getattr(nccl.nccl, f"NCCL_{case.op.upper()}")
    arguments = int(source.data.ptr), int(target.data.ptr), count, *kinds
    reduce, current = nccl.comm.allReduce, cupy().cuda.get_current_stream
    return Method(lambda: reduce(*arguments, current().ptr), captures=True, arrays=(source, target))


def own(bench: Bench, case: AllreduceCase, arrays: Any, algorithm: str | None) -> Method:
    """Make `halox.Allreduce` twice, as a process compiles and maps only once, and time the second time."""
    source, target = arrays

    def make() -> Any:
        try:
            made = halox.Allreduce(
                bench.comm, case.elements, case.dtype, case.op, algorithm, device=bench.device
            )
        except FieldError as error:
            raise PathError(str(error)) from error
        made(source, out=target)
        bench.stage.synchronize()
        return made

    make().close()
    bench.stage.settle()
    bench.comm.Barrier()
    begin = time.perf_counter()
    reduce = make()
    us = bench.comm.allreduce((time.perf_counter() - begin) * 1e6, load_mpi().MAX)

    found = {"path": reduce.algorithm, "setup_us": us}
    captures = bench.on_gpu and reduce.captures
    call = partial(reduce, source, out=target)
    return Method(call, reduce.close, captures, arrays, found=found)


def measure(bench: Bench, args: argparse.Namespace, case: AllreduceCase) -> list[Row]:
    comm, stage = bench.comm, bench.stage
    known = DEVICE_ALGORITHMS if bench.on_gpu else HOST_ALGORITHMS
    names = known if args.algorithms is None else args.algorithms
    if not {*names} <= {*known}:
        raise HaloxError(f"--algorithms {','.join(names)}: expected some of {', '.join(known)}")
    if not bench.fits(2 * case.nbytes):
        return bench.left_out(case, f"{case.nbytes:,} bytes a rank are too many")
    with stage.current():
        arrays = [stage.xp.zeros(case.elements, case.dtype) for _ in range(2)]
    oracle = AllreduceOracle(case, comm.rank, comm.size, stage.xp)

    def check(method: Method, call: Call) -> int:
        wrong = 0
        for step in range(1, CHECKS + 1):
            source, target = method.arrays
            oracle.fill(source, target, step)
            call()
            stage.synchronize()
            wrong += oracle.wrong(target, step)
        return wrong

    plans = [Plan(SELECTED, SELECTED, partial(own, bench, case, arrays, None))]
    plans += [Plan(NAMED, name, partial(own, bench, case, arrays, name)) for name in names]
    if bench.on_gpu:
        plans += [
            Plan(BASELINE, NCCL, partial(by_nccl, bench, case, *arrays)),
            Plan(BASELINE, HOST_STAGED, partial(host_staged, comm, case, *arrays)),
        ]
    else:
        plans.append(Plan(BASELINE, BY_MPI, partial(by_mpi, comm, case, *arrays)))
    rows = timed(bench, case, plans, check, graph=not args.no_graph)
    bench.free()
    return rows


ALLREDUCE = Kind(
    "allreduce",
    "allreduces: every algorithm, halox's own choice, and allreduces by hand",
    cases,
    measure,
    (
        Option("--sizes", "bytes of each rank's array, as in 8,64KiB,128MiB", sizes),
        Option("--dtype", "dtypes; default: f4", dtypes, ("f4",)),
        Option("--op", f"out of {', '.join(_UFUNCS)}; default: sum", words_of(*_UFUNCS), ("sum",)),
    ),
    (Column("bytes", "nbytes"), Column("set-up us", "setup_us")),
    named="algorithms",
    budget_s=80.0,
)
