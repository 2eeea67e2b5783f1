"""Exchanges of PyTorch's tensors with gradients; on GPUs in tests/gpu/ranks/test_torch_gpu.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import FieldError, HaloxError
from tests.mpi.conftest import agree
from tests.mpi.limits import short_waits

torch: Any = pytest.importorskip("torch")

import halox.torch  # noqa: E402
from tests import gradients  # noqa: E402

pytestmark = [pytest.mark.ranks(1, 2, 3, 4, 6)]
torch.set_num_threads(1)


@pytest.mark.parametrize("name", gradients.OPERATORS)
def test_derivatives(name: str, comm: MPI.Intracomm) -> None:
    assert agree(gradients.check_first_order(name, comm), comm)


@pytest.mark.parametrize("name", ["numbers", "phase", "in place"])
def test_derivatives_of_derivatives(name: str, comm: MPI.Intracomm) -> None:
    assert agree(gradients.check_second_order(name, comm), comm)


@pytest.mark.parametrize(
    ("shape", "padding"),
    [((11, 10), "circular"), ((9, 13), "reflect"), ((31,), "replicate"), ((5, 7, 6), "circular")],
)
def test_convolutions_have_the_gradients_of_one_rank(
    shape: Any, padding: str, comm: MPI.Intracomm
) -> None:
    assert agree(gradients.check_convolutions(shape, padding, comm) < 1e-12, comm)


def kinds_of_tensors(shape: Any) -> dict[str, Any]:
    """Return tensors of a shape behind two axes, longer than blocks are, of different strides and dtypes."""
    plain = torch.randn(17, 18, *shape, dtype=torch.float64)
    numbers = torch.complex(plain, plain.flip(1))
    return {
        "contiguous": plain,
        "channels_last": plain.to(memory_format=torch.channels_last),
        "transposed": torch.randn(*shape[::-1], 18, 17).permute(3, 2, 1, 0),
        "part": plain[1:2, ::2],
        "repeated": plain[:, :1].expand(17, 18, *shape),
        "half": plain.half(),
        "complex": numbers,
        "conjugate": numbers.conj(),
    }


def array(tensor: Any) -> np.ndarray:
    copied: np.ndarray = tensor.detach().resolve_conj().numpy().copy()
    return copied


@pytest.mark.parametrize("name", kinds_of_tensors((1, 1)))
def test_values_are_those_of_the_grid(name: str, comm: MPI.Intracomm) -> None:
    """Also for a gradient with strides of 0, as that of `sum`. The given tensor stays as it is."""
    with halox.Grid((7, 15), halo=((1, 2), 1), boundary="reflect", comm=comm, device="cpu") as grid:
        torch.manual_seed(comm.rank)
        given = kinds_of_tensors(grid.padded_shape)[name]
        before, field = array(given), array(given)
        found = halox.torch.exchange(grid, given.requires_grad_())
        gradient = torch.ones(()).to(found.dtype).expand(found.shape)
        found.backward(gradient)
        added = array(gradient)
        grid.exchange(field)
        grid.accumulate(added)
        right = [np.array_equal(array(found), field), np.array_equal(array(given), before)]
        right.append(np.array_equal(array(given.grad), added))
    assert agree(all(right), comm), right


DTYPES = (torch.float64, torch.float32, torch.complex64)


def test_several_tensors_in_one_exchange(comm: MPI.Intracomm) -> None:
    """Gradients reach those that need them, although one result is not used."""
    with halox.Grid((8, 9), periodic=True, comm=comm, device="cpu") as grid:
        a, b, c = (torch.ones(2, *grid.padded_shape, dtype=dtype) for dtype in DTYPES)
        found = halox.torch.exchange(grid, a.requires_grad_(), b, c.requires_grad_())
        (found[0].sum() + found[1].sum()).backward()
        copies = torch.zeros_like(a).numpy() + 1
        grid.accumulate(copies)
        right = [np.array_equal(a.grad, copies), b.grad is None, not c.grad.any()]
    assert agree(all(right), comm), right


def test_without_gradients(comm: MPI.Intracomm) -> None:
    """Leaves may then change in place."""
    with halox.Grid(12, periodic=True, comm=comm, device="cpu") as grid:
        u = torch.full(grid.padded_shape, float(comm.rank), requires_grad=True)
        with torch.no_grad():
            assert halox.torch.exchange(grid, u, inplace=True) is u
            assert not halox.torch.exchange(grid, u).requires_grad
        around = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        right = (u[0].item(), u[-1].item()) == around
    assert agree(right, comm)


def test_a_step_of_training_makes_no_plans_after_the_first(comm: MPI.Intracomm) -> None:
    with halox.Grid((8, 6), comm=comm, device="cpu") as grid:
        made = []
        for _ in range(3):
            x = torch.rand(2, 3, *grid.padded_shape, requires_grad=True)
            halox.torch.exchange(grid, x).square().sum().backward()
            made.append(grid.domain.plans_made)
    assert made == [2, 2, 2]


WRONG = {
    "an array": (lambda u: u.numpy(), {}, r"tensors\[0\] must be a torch.Tensor, got ndarray"),
    "leaf": (lambda u: u.requires_grad_(), {"inplace": True}, r"tensors\[0\] is a leaf"),
    "no halo": (lambda u: u[..., 1:-1, 1:-1], {}, "without their halo"),
    "bfloat16": (lambda u: u.bfloat16(), {}, "field: "),
    "no memory": (lambda u: u.to("meta"), {}, "field: "),
    "option": (lambda u: u, {"axes": 3}, "axes: "),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_argument_is_an_error_on_all_ranks(name: str, comm: MPI.Intracomm) -> None:
    """On the last rank alone, then on all. A call with a mistake has no effect on later calls."""
    change, options, text = WRONG[name]
    with halox.Grid((9, 8), comm=comm, device="cpu") as grid, short_waits(20):
        for wrong in (comm.rank == comm.size - 1, True):
            tensor = torch.zeros(2, *grid.padded_shape)
            with pytest.raises(FieldError, match=text):
                halox.torch.exchange(grid, change(tensor) if wrong else tensor, **options)
        halox.torch.exchange(grid, torch.zeros(2, *grid.padded_shape))


def test_a_plan_that_no_grid_has_made(comm: MPI.Intracomm) -> None:
    with halox.Exchange([], [], comm=comm) as exchange, pytest.raises(HaloxError, match="grid"):
        halox.torch.exchange(exchange, torch.zeros(3))
