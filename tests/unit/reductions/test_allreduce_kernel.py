"""The reduction kernels, compiled as C++ and run on the CPU with one thread per rank."""

from __future__ import annotations

import time
import warnings
from threading import Barrier
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halox.errors import ExchangeTimeoutError, FieldError
from halox.reductions.device import kernel_plans as allreduce_plan
from halox.reductions.device.kernel_plans import plan_oneshot, plan_scattered, plan_wide
from halox.reductions.device.kernel_reductions import (
    FieldReduction,
)
from halox.reductions.field_operations import FIELD_OPERATIONS
from halox.runtime.arrays import describe
from tests.fakes.cpu_allreduce import (
    Stream,
    at_once,
    connect,
    connect_arrays,
    connect_fields,
    number,
    reduce_arrays,
    reduce_once,
    without_gpu,
)
from tests.support import full, require, trials
from tests.unit.reductions.reduction_oracle import expected, sample

require("cxx")

PLANS = {"oneshot": plan_oneshot, "wide": plan_wide, "scattered": plan_scattered}
ORDERS = ("forward", "backward", "random")

# Each element size and each kind of operation, with NaN and infinities; test_operations.py covers all pairs.
PAIRS = [("sum", "f8"), ("min", "f8"), ("prod", "c16"), ("max", "i2"), ("logical_xor", "u1")]
MORE_PAIRS = [("sum", "f4"), ("sum", "c8"), ("bitwise_or", "?"), ("prod", "u4")]


RUNS = {
    # More ranks than the kernel loads at once, any order of blocks, out of place and in place.
    "one rank": {"elements": 321, "n": 1, "order": "forward", "in_place": True},
    "two ranks": {"elements": 321, "n": 2},
    "blocks backward": {"elements": 321, "order": "backward", "in_place": True},
    "five ranks": {"elements": 321, "n": 5, "order": "forward"},
    "nine ranks": {"elements": 321, "n": 9, "in_place": True},
    "sixteen ranks": {"elements": 321, "n": 16},
    "4 bytes off": {"dtype": "f4", "elements": 301, "offset": 4},
    "8 bytes off": {"dtype": "f4", "elements": 301, "offset": 8},
    "12 bytes off": {"dtype": "f4", "elements": 301, "offset": 12, "in_place": True},
    "blocks at once": {"elements": 600, "parts": (64, 64), "multiprocessors": 3, "delays": 5},
    "late accesses": {"elements": 90, "n": 4, "delays": 30, "epochs": 6, "in_place": True},
    "a late rank": {"elements": 40, "epochs": 4, "late_s": {2: 0.01}},
    "signs that change": {"elements": 100, "epochs": 7, "first": 2**31 - 3},
    "epochs that wrap around": {"elements": 100, "epochs": 7, "first": 2**32 - 3},
}


def arrays(op, dtype, n):
    return lambda rank, epoch: sample(dtype, op, n, (rank, epoch))


def folded(op):
    return lambda values: expected(op, values)


def run(algorithm, op, dtype, elements, n, *, parts=None, threads=256, epochs=3, **options):
    """Reduce with a plan of several chunks, by means of a small limit on their size."""
    blocks = options.pop("blocks", 6)
    limits = {"PART_BYTES": parts or (16, 256), "THREADS": threads, "BLOCKS": blocks}
    of_wide = {"WIDE_THREADS": min(threads, 64), "WIDE_BLOCKS": blocks}
    with patch.multiple(allreduce_plan, **limits, **of_wide):
        plan = PLANS[algorithm](np.dtype(dtype), op, elements, n)
        ranks = connect_arrays(n, plan)
    reduce_arrays(ranks, arrays(op, dtype, elements), folded(op), epochs, **options)
    return ranks


@pytest.mark.parametrize("algorithm", PLANS)
@pytest.mark.part(2)
class TestArrays:
    @pytest.mark.parametrize("elements", [1, 7, 500])
    @pytest.mark.parametrize(("op", "dtype"), [*PAIRS, *full(*MORE_PAIRS)])
    def test_elements_of_all_sizes(self, algorithm, op, dtype, elements):
        if algorithm != "wide" or dtype != "c16":
            run(algorithm, op, dtype, elements, 3, threads=32, in_place=elements == 7)

    @pytest.mark.parametrize("case", RUNS)
    def test_runs(self, algorithm, case):
        run(algorithm, **{"op": "sum", "dtype": "f8", "n": 3, "threads": 32} | RUNS[case])

    @pytest.mark.parametrize("elements", [1, 3, 31, 32, 33, 64, 97])
    def test_not_a_byte_more_than_the_array(self, algorithm, elements):
        """Full chunks and parts, one element more or less, and empty parts; also with four elements in a packet."""
        run(algorithm, "sum", "f8", elements, 3, parts=(16, 64), threads=32)
        run(algorithm, "sum", "i2", 4 * elements + 1, 3, parts=(16, 64), threads=32)

    @pytest.mark.parametrize("blocks", [1, 5, 40])
    def test_fewer_blocks_than_chunks(self, algorithm, blocks):
        elements = 1500 if algorithm == "wide" else 640
        ranks = run(algorithm, "sum", "f8", elements, 2, parts=(64, 64), threads=32, blocks=blocks)
        plan = ranks[0].reduction.plan
        assert plan.chunks > 5 and plan.blocks == min(blocks, plan.chunks)

    def test_a_thousand_epochs(self, algorithm):
        """Ranks do not synchronize between reductions; all ranks get the same bits each time."""
        run(algorithm, "sum", "f8", 9, 3, parts=(16, 16), epochs=trials(1000), in_place=True)

    def test_a_rank_that_refuses_a_call_is_named(self, algorithm):
        """Earlier reductions succeed; the refused one ends at the time limit on each of the other ranks."""
        n, missing = 4, 2
        ranks = connect_arrays(n, PLANS[algorithm](np.dtype("f8"), "sum", 200, n))
        reduce_arrays(ranks, lambda r, e: np.full(200, r + e, "f8"), folded("sum"), 2)
        streams = [Stream(i, "random", 1, 0, 0) for i in range(n)]
        found = [np.ones(200) for _ in range(n)]
        together = Barrier(n - 1)  # a rank that starts late would be reported instead
        for rank in ranks:
            rank.limit(1.0)

        def reduced(i, error=None):
            at = found[i].ctypes.data
            ranks[i].reduction.reduce(at, at, streams[i], error)

        def work(i):
            if i == missing:
                with pytest.raises(FieldError):
                    reduced(i, FieldError("does not fit"))
                return
            together.wait()
            start = time.monotonic()
            reduced(i)
            assert time.monotonic() - start >= 1.0
            assert ranks[i].failure == (missing + 1, 3)
            if i:
                for _ in range(2):
                    text = f"rank {i} has waited for rank {missing} in reduction 3"
                    with pytest.raises(ExchangeTimeoutError, match=text):
                        reduced(i)

        with without_gpu():
            at_once(n, work)
        with pytest.warns(UserWarning, match="rank 0 has waited for rank 2"):
            ranks[0].reduction.close()
        ranks[1].reduction.close()  # no warning: it has raised the error

    def test_a_mistake_on_all_ranks(self, algorithm):
        """The next call is right; a mistake is not told again at the end."""
        ranks = connect_arrays(3, PLANS[algorithm](np.dtype("f8"), "sum", 200, 3))
        reduce_arrays(ranks, lambda r, e: np.full(200, r + e, "f8"), folded("sum"), 2)

        def refuse(i):
            with pytest.raises(FieldError):
                ranks[i].reduction.refuse(FieldError(), Stream(i, "random", 1, 0, 0))

        def work(i):
            found = np.full(200, float(i))
            stream = Stream(i, "random", 1, 0, 0)
            ranks[i].reduction.reduce(found.ctypes.data, found.ctypes.data, stream)
            return found

        with without_gpu():
            at_once(3, refuse)
            assert all((one == 3).all() for one in at_once(3, work))
            at_once(3, refuse)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for rank in ranks:
                    rank.reduction.close()

    def test_what_was_sent_before_is_not_taken_twice(self, algorithm):
        ranks = connect_arrays(2, PLANS[algorithm](np.dtype("f8"), "sum", 8, 2))
        reduce_arrays(ranks, lambda r, e: np.full(8, r + e, "f8"), folded("sum"), 4)
        ranks[1].limit(0.1)
        target = np.full(8, -1.0)
        with without_gpu():
            stream = Stream(1, "forward", 1, 0, 0)
            ranks[1].reduction.reduce(np.ones(8).ctypes.data, target.ctypes.data, stream)
        assert ranks[1].failure == (1, 5)
        assert algorithm == "scattered" or (target == -1).all()


def fields(dtype, shapes, halo=1):
    """Return each rank's cells: views without the halo."""
    found = []
    for rank, shape in enumerate(shapes):
        padded = sample(dtype, "prod", tuple(n + 2 * halo for n in shape), rank)
        if np.dtype(dtype).kind == "f":
            padded = np.nan_to_num(padded, nan=1.5, posinf=2.5, neginf=-3.5)
        found.append(padded[(slice(halo, -halo),) * len(shape)])
    return found


NUMBERS = {
    "sum": lambda cells, wide: np.sum(cells, dtype=wide),
    "min": lambda cells, _: np.min(cells),
    "max": lambda cells, _: np.max(cells),
    "norm": lambda cells, _: np.sqrt(np.sum(np.abs(cells.astype("c16")) ** 2)),
}
UNEVEN = [(9, 12, 7), (8, 12, 7), (1, 3, 2)]


class TestFields:
    @pytest.mark.parametrize("dtype", ["f4", "f8", "c16", "i2", "?", *full("c8", "u8")])
    @pytest.mark.parametrize("name", NUMBERS)
    @pytest.mark.part(2)
    def test_numbers_of_all_cells(self, name, dtype):
        if np.dtype(dtype).kind == "c" and name in ("min", "max"):
            with pytest.raises(FieldError):
                connect_fields(FIELD_OPERATIONS[name], fields(dtype, UNEVEN))
            return
        cells = fields(dtype, UNEVEN)
        ranks = connect_fields(FIELD_OPERATIONS[name], cells)
        everything = np.concatenate([one.reshape(-1) for one in cells])
        wide = {"c": "c16", "f": "f8", "u": "u8"}.get(np.dtype(dtype).kind, "i8")
        wanted = NUMBERS[name](everything, wide)
        first = reduce_once(ranks, wanted.dtype, order="forward")
        for seed, order in enumerate(ORDERS):
            found = reduce_once(ranks, wanted.dtype, order=order, seed=seed, multiprocessors=2)
            assert {one.tobytes() for one in found} == {first[0].tobytes()}
        if np.dtype(dtype).kind in "fc" and name in ("sum", "norm"):
            np.testing.assert_allclose(first[0], wanted, rtol=1e-13)
        else:
            assert first[0] == wanted

    @pytest.mark.parametrize("dtype", ["f4", "c16", "i4", *full("f8", "c8")])
    def test_dot(self, dtype):
        a = fields(dtype, UNEVEN)
        b = [one[::-1, :, ::-1] for one in fields(dtype, UNEVEN)]
        ranks = connect_fields(FIELD_OPERATIONS["dot"], a, b)
        wide = np.result_type(dtype, "f8") if np.dtype(dtype).kind in "fc" else np.dtype("i8")
        x, y = (np.concatenate([one.astype(wide).reshape(-1) for one in both]) for both in (a, b))
        wanted = np.sum(np.conj(x) * y)
        found = reduce_once(ranks, wide)
        np.testing.assert_allclose(found[0], wanted, rtol=1e-12)
        assert len({one.tobytes() for one in found}) == 1

    @pytest.mark.parametrize("name", ["min", "max", "sum"])
    def test_nan_is_not_lost(self, name):
        cells = fields("f8", UNEVEN)
        cells[1][3, 4, 5] = np.nan
        assert all(
            np.isnan(one)
            for one in reduce_once(connect_fields(FIELD_OPERATIONS[name], cells), "f8")
        )

    @pytest.mark.parametrize("name", ["min", "max"])
    @pytest.mark.parametrize("dtype", ["i1", "f4", "?", *full("u8")])
    def test_extremes_of_a_dtype(self, name, dtype):
        """All cells equal the initial value of the reduction."""
        dtype = np.dtype(dtype)
        limit = {"b": lambda: name == "min", "f": lambda: np.inf if name == "min" else -np.inf}
        value = limit.get(
            dtype.kind, lambda: getattr(np.iinfo(dtype), {"min": "max", "max": "min"}[name])
        )()
        cells = [np.full((3, 3), value, dtype) for _ in range(2)]
        assert reduce_once(connect_fields(FIELD_OPERATIONS[name], cells), dtype) == [value, value]

    @pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3, 4, 5), (2, 2, 2, 2, 3)])
    def test_axes(self, shape):
        cells = [sample("i4", "sum", (*shape, 2), i)[..., 0] for i in range(2)]
        found = reduce_once(connect_fields(FIELD_OPERATIONS["sum"], cells), "i8")
        assert found == [sum(int(one.sum(dtype="i8")) for one in cells)] * 2

    @pytest.mark.parametrize("sms", [1, 3])
    def test_many_cells(self, sms):
        """More cells than the threads of a launch read at once, so that they loop."""
        cells = [sample("i8", "sum", (40, 33, 31), i)[1:-1, 2:, :-1] for i in range(2)]
        ranks = connect_fields(FIELD_OPERATIONS["sum"], cells, sms=sms)
        ((*_, launch),) = ranks[0].reduction._launches.values()
        assert launch.blocks == 4 * sms and launch.threads * launch.blocks * 4 < cells[0].size
        wanted = sum(int(one.sum()) for one in cells)
        wrapped = (wanted + 2**63) % 2**64 - 2**63
        assert reduce_once(ranks, "i8") == [wrapped, wrapped]

    def test_fields_in_turn(self):
        """One reduction serves fields of any shape and strides, different on each rank, and precomputed values."""
        first = [sample("i4", "sum", (9, 5 + i), i)[1:-1] for i in range(3)]
        others = [sample("i4", "sum", (3, 4000), i).T for i in range(3)]
        ranks = connect_fields(FIELD_OPERATIONS["sum"], first)
        wanted = [sum(int(one.sum(dtype="i8")) for one in some) for some in (first, others)]
        values = [np.array([100 + i]) for i in range(3)]
        out = np.zeros((3, 6), "i8")
        streams = [Stream(i, "random", 1, 3, 0) for i in range(3)]

        def work(i):
            for call in range(6):
                target = out[i, call:].ctypes.data
                if call % 3 == 2 and i == 1:
                    ranks[i].reduction.of_value(values[i].ctypes.data, target, streams[i])
                else:
                    field = (first, others)[call % 2][i]
                    ranks[i].reduction([describe(field)], target, streams[i])

        with without_gpu():
            at_once(3, work)
        for call in range(6):
            total = wanted[call % 2]
            if call % 3 == 2:
                total += 101 - int((first, others)[call % 2][1].sum(dtype="i8"))
            assert out[:, call].tolist() == [total] * 3

    def test_a_rank_that_never_comes_is_named_with_the_reduction(self):
        ranks = connect_fields(FIELD_OPERATIONS["norm"], [np.ones((3, 4)) + i for i in range(2)])
        reduce_once(ranks, "f8")
        ranks[0].limit(0.1)
        out, stream = np.full(1, -1.0), Stream(0, "forward", 1, 0, 0)
        with without_gpu():
            number(ranks[0], out.ctypes.data, stream)
            assert ranks[0].failure == (2, 2) and out == -1
            text = r"rank 0 has waited for rank 1 in reduction 2 \(norm\)"
            with pytest.raises(ExchangeTimeoutError, match=text):
                number(ranks[0], out.ctypes.data, stream)

    @pytest.mark.parametrize("dtype", ["f8", "f4", "i4", "?"])
    def test_cells_of_one_rank(self, dtype):
        cells = fields(dtype, UNEVEN)[0]

        def make(world, arena):
            operation = FIELD_OPERATIONS["norm"].before_ranks
            made = FieldReduction(world, arena, operation, cells.dtype, 1)
            made.open_alone()
            return made

        (rank,) = connect(1, make)
        rank.cells = [describe(cells)]
        found = np.array(reduce_once([rank], "f8", multiprocessors=2))
        np.testing.assert_allclose(found, (cells.astype("f8") ** 2).sum(), rtol=1e-12)

    def test_a_thousand_epochs(self):
        cells = [np.arange(24.0).reshape(4, 6) + i for i in range(3)]
        ranks = connect_fields(FIELD_OPERATIONS["norm"], cells)
        found = set()
        out = [np.zeros(1) for _ in ranks]
        streams = [Stream(i, "random", 1, 0, 0) for i in range(3)]

        def work(i):
            for epoch in range(trials(1000)):
                cells[i][0, 0] = epoch if i == 0 else cells[i][0, 0]
                number(ranks[i], out[i].ctypes.data, streams[i])
                wanted = sum(float(np.sum(c**2)) for c in cells[1:]) + float(
                    np.sum((np.arange(1.0, 24.0)) ** 2) + epoch**2
                )
                np.testing.assert_allclose(out[i][0], np.sqrt(wanted), rtol=1e-14)
            assert ranks[i].epochs == trials(1000)
            found.add(out[i].tobytes())

        with without_gpu():
            at_once(3, work)
        assert len(found) == 1

    def test_a_refused_number(self):
        """All ranks refuse a call; the next one is right."""
        cells = fields("f8", UNEVEN)
        ranks = connect_fields(FIELD_OPERATIONS["sum"], cells)
        streams = [Stream(i, "random", 1, 0, 0) for i in range(3)]
        out = np.zeros(3)

        def work(i):
            with pytest.raises(FieldError):
                ranks[i].reduction.refuse(FieldError(), streams[i])
            number(ranks[i], out[i:].ctypes.data, streams[i])

        with without_gpu():
            at_once(3, work)
        np.testing.assert_allclose(out, sum(float(one.sum()) for one in cells), rtol=1e-12)


@settings(max_examples=trials(80))
@given(st.data())
def test_any_array_in_any_order(data):
    algorithm = data.draw(st.sampled_from(sorted(PLANS)))
    largest = "c8" if algorithm == "wide" else "c16"
    op, dtype = data.draw(st.sampled_from([("sum", "f8"), ("max", "i2"), ("prod", largest)]))
    part = 16 * 2 ** data.draw(st.integers(0, 4))
    run(
        algorithm,
        op,
        dtype,
        data.draw(st.integers(1, 700)),
        data.draw(st.integers(1, 4)),
        parts=(part, part),
        threads=data.draw(st.sampled_from([32, 64])),
        blocks=data.draw(st.integers(1, 9)),
        first=data.draw(st.sampled_from([1, 2**32 - 2])),
        order=data.draw(st.sampled_from(ORDERS)),
        multiprocessors=data.draw(st.sampled_from([1, 2])),
        delays=data.draw(st.sampled_from([0, 3])),
        in_place=data.draw(st.booleans()),
        offset=16 * data.draw(st.integers(0, 3)) + np.dtype(dtype).itemsize % 16,
        seed=data.draw(st.integers(0, 99)),
    )
