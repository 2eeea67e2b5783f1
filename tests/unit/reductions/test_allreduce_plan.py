"""Plans of reductions by kernels: structs, chunks, memory and limits. No kernel runs."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from halox.errors import FieldError
from halox.packing.strided_plan import MAX_WORDS, region_dtype
from halox.reductions.device.field_plans import EXACT_WORDS, field_row, plan_field
from halox.reductions.device.kernel_plans import (
    ALLREDUCE,
    EPOCH_SHIFT,
    LEAST_THREADS,
    MOST_CHUNKS,
    MOST_RANKS,
    THREADS,
    plan_oneshot,
    plan_scattered,
    plan_wide,
)
from halox.reductions.field_operations import EXACT_OPERATIONS, FIELD_OPERATIONS
from tests.fakes.cpu_allreduce import built
from tests.support import require

PARAMETER_BYTES = 4096
"""CUDA's limit on the parameters of a launch."""

F8 = np.dtype("f8")

PARTIALS = np.dtype([("at", "u8"), ("identity", "u8", (2,))])
"""Parameter of ``allreduce_field`` and ``exact_field`` for one result."""


def test_structs_are_the_kernels():
    """Struct sizes, offsets and constants agree between the C++ source and Python."""
    require("cxx")
    defines = (("MAX_LEVELS", "3"), ("MAX_THREADS", "256"))
    dtypes = {"Allreduce": ALLREDUCE, "Partials": PARTIALS, "Region": region_dtype(3)}
    constants = {
        "EPOCH_SHIFT": EPOCH_SHIFT,
        "MOST_RANKS": MOST_RANKS,
        "sizeof(State)": 16,
        "unit_bytes<double>": plan_oneshot(F8, "sum", 1, 1).rank_bytes // LEAST_THREADS,
        "unit_bytes<Complex<double>>": plan_oneshot(np.dtype("c16"), "sum", 1, 1).rank_bytes
        // LEAST_THREADS,
        "unit_elements<short>": 4,
    }
    texts, expected = list(constants), list(constants.values())
    for struct, dtype in dtypes.items():
        texts += [f"sizeof({struct})", *(f"__builtin_offsetof({struct}, {m})" for m in dtype.names)]
        expected += [dtype.itemsize, *(dtype.fields[m][1] for m in dtype.names)]
    extra = f'extern "C" {{ unsigned long layout[] = {{{", ".join(texts)}}}; }}'
    library = ctypes.CDLL(str(built("allreduce_field", defines, extra)))
    found = (ctypes.c_ulong * len(expected)).in_dll(library, "layout")
    assert dict(zip(texts, found, strict=True)) == dict(zip(texts, expected, strict=True))


def test_words_are_the_kernels():
    require("cxx")
    defines = (("MAX_LEVELS", "3"), ("MAX_THREADS", "256"), ("PARTS", "2"))
    texts = "sizeof(Partials), WORDS, SIZE, unit_bytes<double>"
    extra = f'extern "C" {{ unsigned long layout[] = {{{texts}}}; }}'
    library = ctypes.CDLL(str(built("exact_field", defines, extra)))
    found = (ctypes.c_ulong * 4).in_dll(library, "layout")
    plan = plan_field(
        EXACT_OPERATIONS["sum"], np.dtype("c16"), field_row(0, (9,), (16,), 16), 3, sms=2
    )
    assert list(found) == [PARTIALS.itemsize, EXACT_WORDS, plan.rank_bytes // 16, 16]
    assert plan.partial_bytes == 16 * EXACT_WORDS


def test_the_parameters_travel_with_the_launch():
    assert ALLREDUCE.itemsize + PARTIALS.itemsize + region_dtype(5).itemsize <= PARAMETER_BYTES


@pytest.mark.parametrize("make", [plan_oneshot, plan_wide, plan_scattered])
@pytest.mark.parametrize("elements", [1, 31, (1 << 20) + 1, 1 << 24])
def test_large_arrays_stay_within_the_limits_of_the_kernels(elements, make):
    for dtype, ranks in (("i1", 1), ("f4", 3), ("f8", MOST_RANKS)):
        plan = make(np.dtype(dtype), "sum", elements, ranks)
        assert 1 <= plan.blocks <= plan.chunks <= MOST_CHUNKS
        assert plan.chunks + plan.blocks < 1 << EPOCH_SHIFT
        assert LEAST_THREADS <= plan.threads <= THREADS
        assert plan.threads & (plan.threads - 1) == 0
        assert plan.chunk_elements * np.dtype(dtype).itemsize < 2**32
        assert plan.state_offset + 16 <= plan.partials_offset <= plan.memory_bytes
        assert plan.rank_bytes % 16 == plan.slot_bytes % 16 == plan.state_offset % 256 == 0


def test_arrays_that_are_too_large_for_packets():
    with pytest.raises(FieldError):
        plan_oneshot(F8, "sum", 1 << 30, 2)
    plan = plan_scattered(F8, "sum", 1 << 33, 2)
    assert plan.chunks <= MOST_CHUNKS


@pytest.mark.parametrize("plan", [plan_oneshot, plan_wide, plan_scattered])
def test_what_a_kernel_does_not_serve(plan):
    with pytest.raises(FieldError):
        plan(F8, "sum", 10, 17)
    with pytest.raises(FieldError):
        plan(np.dtype("c8"), "max", 10, 2)


class TestFields:
    def test_axes_without_gaps_are_one_loop(self):
        array = np.zeros((4, 5, 6))
        assert [x.steps for x in field_row(0, array.shape, array.strides, 8).levels] == [120]
        other = np.zeros((4, 5, 7))[..., 1:]
        row = field_row(0, array.shape, array.strides, 8, (0, other.strides))
        assert [x.steps for x in row.levels] == [20, 6]

    def test_what_a_kernel_does_not_walk(self):
        assert field_row(0, (MAX_WORDS,), (8,), 8) is not None
        assert field_row(0, (MAX_WORDS + 1,), (8,), 8) is None
        assert field_row(0, (2,) * 5, [8 * 3**k for k in range(5)], 8) is not None
        assert field_row(0, (2,) * 6, [8 * 3**k for k in range(6)], 8) is None
        assert field_row(0, (0, 3), (24, 8), 8) is None

    @pytest.mark.parametrize("words", [1, 33, 10_000, 1 << 27])
    def test_the_launch_fills_the_gpu_once(self, words):
        row = field_row(0, (words,), (8,), 8)
        plan = plan_field(FIELD_OPERATIONS["norm"], F8, row, 8, sms=132)
        assert plan.blocks <= 4 * 132
        assert plan.threads >= MOST_RANKS
        assert plan.blocks * plan.threads >= min(words, 132 * 4 * THREADS) / 4
        assert plan.partials_offset + plan.blocks * 8 <= plan.memory_bytes
        assert plan.slot_bytes == 8 * 16
