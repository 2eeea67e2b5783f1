"""The choice of the process grid, against all process grids, measured by their halo regions."""

from __future__ import annotations

import math
import re
import time
from itertools import product

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from halox.decomposition import (
    AxisPartition,
    Decomposition,
    FieldLayout,
    FieldSpec,
    Placement,
    block_cells,
    decompose,
)
from halox.decomposition.field_regions import check_widths, exchange_regions
from halox.decomposition.procgrid import counted_halo
from halox.errors import DecompositionError
from tests.support import trials


def choose_proc_shape(
    ranks, shape, halo=0, periodic=False, proc_shape=None, blocks=None, block_cells=0
):
    settings = {"proc_shape": proc_shape, "blocks": blocks, "block_cells": block_cells}
    return decompose(shape, ranks, halo=halo, periodic=periodic, **settings).proc_shape


def measured(shape, halo, periodic, procs, blocks, block_cells):
    """Return a process grid's rank in the choice by counting the boxes of every rank; None if it is unusable.

    The first entry tells whether a halo is wider than a block that fills it.
    """
    axes = []
    for cells, wraps, parts, cut in zip(shape, periodic, procs, blocks, strict=True):
        if parts != len(cut) if cut else parts > cells:
            return None
        axes.append(
            AxisPartition.from_blocks(cut, wraps)
            if cut
            else AxisPartition.even(cells, parts, wraps)
        )
    axes = tuple(axes)
    domain = Decomposition(axes, Placement.by_rank(procs))
    layout = FieldLayout(domain, 0, FieldSpec(halo))
    try:
        check_widths(layout)
    except DecompositionError:
        return None
    sent, copied = [], []
    for rank in range(domain.ranks):
        totals = {True: 0, False: 0}
        for region in exchange_regions(FieldLayout(domain, rank, FieldSpec(counted_halo(halo)))):
            if region.send:
                *rows, row = region.send.subsizes
                totals[region.peer == rank] += math.prod(rows) * row
                totals[False] += math.prod(rows) * block_cells
        sent.append(totals[False])
        copied.append(totals[True])
    return layout.is_wide, max(sent), max(copied), tuple(-parts for parts in procs)


@st.composite
def grids(draw):
    ndim = draw(st.integers(1, 4))
    shape = tuple(draw(st.integers(1, 12)) for _ in range(ndim))
    halo = tuple((draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in range(ndim))
    return shape, halo, tuple(draw(st.booleans()) for _ in range(ndim))


def assert_best_of_all(ranks, shape, halo, periodic, wanted, blocks, block_cells=0) -> str:
    divisors = [parts for parts in range(1, ranks + 1) if ranks % parts == 0]
    merits = {
        procs: merit
        for procs in product(divisors, repeat=len(shape))
        if math.prod(procs) == ranks
        and all(want in (0, have) for want, have in zip(wanted, procs, strict=True))
        and (merit := measured(shape, halo, periodic, procs, blocks, block_cells)) is not None
    }
    if not merits:
        with pytest.raises(DecompositionError):
            choose_proc_shape(ranks, shape, halo, periodic, wanted, blocks, block_cells)
        return "not workable"
    chosen = choose_proc_shape(ranks, shape, halo, periodic, wanted, blocks, block_cells)
    best = min(merits, key=merits.__getitem__)
    if merits[best][0]:  # Several ranks fill some halo, whichever process grid is chosen.
        assert chosen in merits
        return "workable with wide halos"
    assert chosen == best
    return "workable"


@settings(max_examples=trials(150), print_blob=True)
@given(grids(), st.integers(1, 12), st.integers(0, 4), st.data())
def test_the_choice_is_the_best_of_all_process_grids(grid, ranks, block_cells, data) -> None:
    shape, halo, periodic = grid
    divisors = [parts for parts in range(1, ranks + 1) if ranks % parts == 0]
    wanted = tuple(data.draw(st.sampled_from([0, 0, 0, *divisors])) for _ in shape)
    blocks = tuple(data.draw(st.sampled_from([None] * 3 + cuts(cells))) for cells in shape)
    event(assert_best_of_all(ranks, shape, halo, periodic, wanted, blocks, block_cells))


def cuts(cells: int) -> list[tuple[int, ...]]:
    """Return some uneven partitions of an axis."""
    return [cut for cut in [(cells - 1, 1), (1, cells - 1), (1, cells - 2, 1)] if min(cut) > 0]


def test_an_error_lists_process_grids_that_work() -> None:
    with pytest.raises(DecompositionError) as error:
        choose_proc_shape(8, (16, 4), 1, False, (1, 8))
    found = re.findall(r"\(\d+, \d+\)", str(error.value).partition("workable")[2])
    assert found
    for procs in found:
        numbers = tuple(map(int, re.findall(r"\d+", procs)))
        assert choose_proc_shape(8, (16, 4), 1, False, numbers) == numbers


@pytest.mark.parametrize(
    ("ranks", "shape", "arguments", "expected"),
    [
        (8, (16, 4), {"halo": (1, 3)}, (8, 1)),  # all other process grids have thinner blocks
        (8, (16, 4), {"halo": (1, 3), "proc_shape": (4, 2)}, (4, 2)),
        (3, (16, 8), {"halo": 3, "blocks": (None, (2, 4, 2))}, (1, 3)),
        (2, (12, 10), {"halo": 7, "periodic": True}, (2, 1)),
    ],
)
def test_blocks_thinner_than_the_halo_are_chosen_if_there_are_no_others(
    ranks, shape, arguments, expected
) -> None:
    assert choose_proc_shape(ranks, shape, **arguments) == expected


def test_too_many_ranks_are_refused_at_once() -> None:
    for ranks, shape in ((1_000_000, (64, 64, 64)), (2**30 - 1, (1024, 1024, 1024))):
        with pytest.raises(DecompositionError, match=rf"at most {math.prod(shape)}"):
            decompose(shape, ranks)


@pytest.mark.parametrize(
    ("shape", "periodic", "ranks", "by_bytes", "on_gpus", "on_cpus"),
    [
        ((640, 640, 640), True, 8, (2, 2, 2), (4, 2, 1), (4, 2, 1)),
        ((640, 640, 640), False, 8, (2, 2, 2), (2, 2, 2), (4, 2, 1)),
        ((1024, 1024), True, 4, (2, 2), (4, 1), (4, 1)),
        ((64, 512, 512), True, 4, (1, 2, 2), (1, 4, 1), (1, 4, 1)),
        ((512, 512, 64), True, 4, (2, 2, 1), (2, 2, 1), (2, 2, 1)),
        ((256, 4096), True, 2, (1, 2), (1, 2), (1, 2)),
        ((24, 24, 24, 48), True, 4, (1, 1, 1, 4), (2, 1, 1, 2), (2, 2, 1, 1)),
    ],
)
def test_short_blocks_of_memory_count(shape, periodic, ranks, by_bytes, on_gpus, on_cpus) -> None:
    """The cost of a block is measured for GPUs and CPUs of one node; between nodes bytes alone count."""
    for device, has_network, expected in (
        ("gpu", True, by_bytes),
        ("cpu", True, by_bytes),
        ("gpu", False, on_gpus),
        ("cpu", False, on_cpus),
    ):
        cells = block_cells(device, has_network)
        chosen = choose_proc_shape(ranks, shape, 1, periodic, block_cells=cells)
        assert chosen == expected, device


def test_thousands_of_ranks_in_four_dimensions_are_quick() -> None:
    began = time.thread_time()  # CPU time, since other processes may be busy
    procs = choose_proc_shape(2520, (512, 400, 300, 128), halo=2)
    assert time.thread_time() - began < 3
    assert math.prod(procs) == 2520
