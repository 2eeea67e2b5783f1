"""Gradients through exchanges of PyTorch's tensors on GPUs; and on the host, since most machines lack PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
from mpi4py import MPI

import halox
from halox.errors import HaloxError
from tests.mpi.conftest import agree
from tests.support import require

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(1, 2)]
require("gpu")
torch: Any = pytest.importorskip("torch")

from tests import gradients  # noqa: E402
from tests.gpu.guarded import stall  # noqa: E402


@pytest.mark.parametrize("device", ["gpu", "cpu"])
@pytest.mark.parametrize("name", gradients.OPERATORS)
def test_derivatives(name: str, device: str, comm: MPI.Intracomm) -> None:
    assert agree(gradients.check_first_order(name, comm, device), comm)


@pytest.mark.parametrize("device", ["gpu", "cpu"])
@pytest.mark.parametrize("name", ["numbers", "phase"])
def test_derivatives_of_derivatives(name: str, device: str, comm: MPI.Intracomm) -> None:
    assert agree(gradients.check_second_order(name, comm, device), comm)


@pytest.mark.parametrize("device", ["gpu", "cpu"])
@pytest.mark.parametrize("padding", gradients.BOUNDARIES)
def test_convolutions_have_the_gradients_of_one_rank(
    padding: str, device: str, comm: MPI.Intracomm
) -> None:
    assert agree(gradients.check_convolutions((11, 10), padding, comm, device) < 1e-12, comm)


def test_it_runs_in_the_current_stream(comm: MPI.Intracomm) -> None:
    """The stream is busy when the tensor is written, and when the gradient is."""
    with halox.Grid((64, 48), periodic=True, comm=comm, device="gpu") as grid:
        place = f"cuda:{grid.device_id}"
        kept = torch.ones(grid.padded_shape, device=place)
        halox.torch.exchange(
            grid, kept.clone().requires_grad_()
        ).sum().backward()  # makes the plans
        torch.cuda.synchronize()
        stream = torch.cuda.Stream(place)
        with torch.cuda.stream(stream), grid.xp.cuda.ExternalStream(stream.cuda_stream):
            x = torch.zeros_like(kept).requires_grad_()
            stall()
            z = x + kept
        with torch.cuda.stream(stream):
            y = halox.torch.exchange(grid, z)
        with grid.xp.cuda.ExternalStream(stream.cuda_stream):
            stall()
        with torch.cuda.stream(stream):
            (y * y).sum().backward()
            right = bool((y == 1).all()) and float(x.grad[1, 1]) == 8.0
    assert agree(right, comm)


def test_a_tensor_of_the_host(comm: MPI.Intracomm) -> None:
    grid = halox.Grid((9, 8), comm=comm, device="gpu")
    with grid, pytest.raises(HaloxError, match="field is on the host"):
        halox.torch.exchange(grid, torch.zeros(grid.padded_shape))
