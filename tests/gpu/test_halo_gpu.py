"""Stores from a kernel into the halos of a rank that is its own neighbour, on a GPU, bit for bit like exchanges."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

import halox
from halox.errors import FieldError
from halox.paths.peer import stores
from tests.support import require

require("gpu")

import cupy  # noqa: E402
import numpy as np  # noqa: E402

from tests.gpu.halo_steps import Steps, graph_of  # noqa: E402

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fused.py"

pytestmark = pytest.mark.gpu


def grid(shape: tuple[int, ...], halo: int = 1, periodic: Any = True, **options: Any) -> halox.Grid:
    options |= {"comm": MPI.COMM_SELF, "device": "gpu"}
    return halox.Grid(shape, halo=halo, periodic=periodic, **options)


@pytest.mark.parametrize(
    ("shape", "halo", "periodic", "dtype"),
    [
        ((256, 256), 1, True, "u4"),
        ((37, 70), 2, (True, False), "i2"),
        ((20, 24, 28), 1, True, "u8"),
        ((9, 6, 11), 2, (False, True, True), "u8"),
        ((2, 3), 2, True, "i2"),
    ],
)
def test_fused_steps(shape: tuple[int, ...], halo: int, periodic: Any, dtype: str) -> None:
    with grid(shape, halo, periodic) as g:
        steps = Steps(g, dtype)
        steps.fill()
        for number in range(5):
            steps.fused(number)
            steps.alone(number)
        assert steps.same()


@pytest.mark.parametrize("shape", [(20, 24, 70), (5, 6, 11), (33, 70)])
@pytest.mark.parametrize("divided", [(0,), (0, 1), (-1,)], ids=str)
def test_warps_count_for_all_of_their_lanes(shape: tuple[int, ...], divided: Any) -> None:
    """A rank that waits for its own flags, as if some axes were divided, counts each cell once."""
    with grid(shape) as g:
        steps, axes = Steps(g), range(len(shape))
        steps.fill()
        own = cupy.zeros(64, "u8")  # a state, and flags behind it
        halo, flags = steps.halo.copy(), own.data.ptr + 128
        sides = [
            tuple(s * (k == axis % len(shape)) for k in axes) for axis in divided for s in (1, -1)
        ]
        halo["state"], halo["flags"], halo["neighbours"] = own.data.ptr, flags, len(sides)
        halo["waited"] = sum(1 << stores._number(side) for side in sides)
        for n, side in enumerate(sides):
            halo["signals"][n] = flags + 4 * stores._number([-s for s in side])
        last = halo["axis"][-1]
        if -1 in divided:
            last["near"], last["far"], last["inner"] = 2, shape[-1], shape[-1] - 2
            halo["row_low"], halo["row_high"] = last["begin"], last["end"]
        cells = stores._waiting_cells(halo["axis"].tolist(), int(halo["waited"]))
        halo["carry"] = (1 << 32) - cells
        steps.halo = halo
        for number in range(5):
            steps.fused(number)
            steps.alone(number)
        assert steps.same()
        assert int(own[0]) == 5 << 32
        assert sorted(set(own[16:].get().view("u4").tolist())) == [0, 5]


def test_a_graph_and_exchanges_between_its_replays() -> None:
    with grid((64, 48)) as g, cupy.cuda.Stream(non_blocking=True) as stream:
        steps = Steps(g)
        steps.fill()
        graph = graph_of(steps, (0, 1), stream)
        for _ in range(20):
            graph.launch(stream)
            steps.plan()
        for number in range(40):
            steps.alone(number)
        assert steps.same()


def test_a_store_outside_the_array() -> None:
    with grid((16, 16)) as g:
        steps = Steps(g, debug=True)
        steps.fill()
        steps.fused(0)
        steps.alone(0)
        assert steps.same()
        steps.kernels["astray"]((1,), (1,), (steps.halo, np.int32(18)))
        cupy.cuda.runtime.deviceSynchronize()
        text = "cell 18 along axis 0, and the array has 18 cells there"
        with pytest.raises(FieldError, match=text):
            _ = steps.plan.device_handle
        with pytest.raises(FieldError, match=text):
            steps.plan()
        assert steps.same(), "the store was left out"


def test_a_cell_that_does_not_wait() -> None:
    """The kernel runs with a block less: the next step finds it."""
    with grid((16, 16)) as g:
        steps = Steps(g, debug=True)
        steps.fill()
        steps.fused(0)
        steps.blocks -= 1
        steps.fused(1)
        steps.fused(2)
        cupy.cuda.runtime.deviceSynchronize()
        with pytest.raises(FieldError, match="once for each owned cell"):
            _ = steps.plan.device_handle


def test_fields_without_a_device_form() -> None:
    with grid((16, 16)) as g:
        fields = g.zeros("f8"), g.zeros("f4")
        with pytest.raises(FieldError):
            _ = g.plan(*fields).device_handle
        walls = g.zeros("f8", parity="even")
        with pytest.raises(FieldError):
            _ = g.plan(walls).device_handle


def test_example() -> None:
    main = runpy.run_path(str(EXAMPLE))["main"]
    assert main(["--cells", "64", "48", "--steps", "100", "--mode", "fused"]) < 1e-13
