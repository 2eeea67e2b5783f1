"""Gradients through exchanges of PyTorch's tensors, on the ranks of a communicator, on CPUs or GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from mpi4py import MPI

import halox
import halox.torch

OPERATORS: dict[str, dict[str, Any]] = {
    "periodic": {"periodic": True},
    "no boundary": {},
    "along a line": {"shape": (7,), "halo": ((2, 1),), "periodic": True, "before": (2,)},
    "wider than a block": {"shape": (6,), "halo": 3, "boundary": "reflect"},
    "in space": {"shape": (4, 1, 3), "boundary": (None, "edge", "symmetric")},
    "numbers": {"boundary": (("constant", 2.0), (("gradient", 3.0), ("antireflect", 0.5)))},
    "linear": {"boundary": ("extrapolate", ("antisymmetric", 1.0)), "halo": ((1, 2), 1)},
    "phase": {"boundary": (("phase", 1j), "symmetric"), "dtype": torch.complex128},
    "faces of one axis": {"periodic": True, "call": {"corners": False, "axes": 1}},
    "in place": {"periodic": True, "call": {"inplace": True}},
    "plan": {"boundary": "edge", "planned": True},
    "staggered": {"boundary": "reflect", "planned": True, "layout": {"staggered": 0}},
    "components behind": {"shape": (7,), "boundary": "symmetric", "after": (2,)},
}
"""Grids and options of exchanges that are differentiated; by default of 5 x 4 cells, halo 1."""


class Copy(torch.autograd.Function):
    """Copy of a value that is the same on all ranks; its gradient is the sum of the gradients of the copies."""

    @staticmethod
    def forward(ctx: Any, comm: MPI.Intracomm, value: torch.Tensor) -> torch.Tensor:
        ctx.comm = comm
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, Sum.apply(ctx.comm, gradient)


class Sum(torch.autograd.Function):
    """Sum over the ranks, by MPI; the adjoint of `Copy`."""

    @staticmethod
    def forward(ctx: Any, comm: MPI.Intracomm, value: torch.Tensor) -> torch.Tensor:
        ctx.comm = comm
        return torch.as_tensor(comm.allreduce(value.detach().resolve_conj().cpu().numpy())).to(
            value
        )

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, Copy.apply(ctx.comm, gradient)


def operator(name: str, comm: MPI.Intracomm, device: Any) -> tuple[halox.Grid, Any, torch.Tensor]:
    """Return a grid, the exchange as a function of the cells of all ranks with all halos, and such cells."""
    options: dict[str, Any] = {"shape": (5, 4), "dtype": torch.float64, **OPERATORS[name]}
    call, before, after = (
        options.pop("call", {}),
        options.pop("before", ()),
        options.pop("after", ()),
    )
    dtype, shape = options.pop("dtype"), options.pop("shape")
    planned, layout = options.pop("planned", False), options.pop("layout", {})
    grid: halox.Grid = halox.Grid(shape, comm=comm, device=device, **options)
    halos: Any = grid
    padded = (*before, *grid.padded_shape, *after)
    if planned:
        field = grid.zeros(**layout)
        halos, padded = grid.plan(field), field.shape
    sizes = comm.allgather(int(np.prod(padded)))
    first, stop, total = sum(sizes[: comm.rank]), sum(sizes[: comm.rank + 1]), sum(sizes)

    def exchange(cells: torch.Tensor) -> torch.Tensor:
        mine = Copy.apply(comm, cells)[first:stop].reshape(padded)
        mine = mine * 1  # no view, which must not be changed in place
        filled = halox.torch.exchange(halos, mine, **call)
        return Sum.apply(comm, F.pad(filled.reshape(-1), (first, total - stop)))

    torch.manual_seed(1)  # the same on all ranks
    place = "cpu" if grid.device_id is None else f"cuda:{grid.device_id}"
    return grid, exchange, torch.randn(total, dtype=dtype).to(place).requires_grad_()


def check_first_order(name: str, comm: MPI.Intracomm, device: Any = "cpu") -> bool:
    """Compare derivatives with differences, along random directions."""
    grid, exchange, cells = operator(name, comm, device)
    with grid:
        return torch.autograd.gradcheck(exchange, cells, raise_exception=False, fast_mode=True)


def check_second_order(name: str, comm: MPI.Intracomm, device: Any = "cpu") -> bool:
    """Compare derivatives of derivatives with differences, along random directions."""
    grid, exchange, cells = operator(name, comm, device)
    with grid:
        return torch.autograd.gradgradcheck(exchange, cells, raise_exception=False, fast_mode=True)


BOUNDARIES = {"circular": "periodic", "reflect": "reflect", "replicate": "edge"}
"""Boundaries of halox by the names of the same padding in PyTorch."""


def check_convolutions(
    shape: tuple[int, ...],
    padding: str,
    comm: MPI.Intracomm,
    device: Any = "cpu",
    dtype: Any = None,
) -> float:
    """Return the largest difference of two convolutions and their gradients from PyTorch on the whole array."""
    dtype = dtype or torch.float64
    convolution = (F.conv1d, F.conv2d, F.conv3d)[len(shape) - 1]
    torch.manual_seed(2)
    whole = torch.randn(2, 3, *shape, dtype=dtype)
    kernels = [torch.randn(n, m, *(3,) * len(shape), dtype=dtype) / 5 for n, m in ((4, 3), (2, 4))]

    def loss(filled: Any, x: torch.Tensor, kernels: list[torch.Tensor]) -> torch.Tensor:
        for kernel in kernels:
            x = torch.tanh(convolution(filled(x), kernel))
        return (x**2).sum()

    widths = (1, 1) * len(shape)
    alone = [one.clone().requires_grad_() for one in (whole, *kernels)]
    expected = loss(lambda x: F.pad(x, widths, padding), alone[0], alone[1:])
    expected.backward()

    with halox.Grid(shape, boundary=BOUNDARIES[padding], comm=comm, device=device) as grid:
        place = "cpu" if grid.device_id is None else f"cuda:{grid.device_id}"
        mine = [one.to(place).requires_grad_() for one in (whole[(..., *grid.owned)], *kernels)]

        def filled(x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = halox.torch.exchange(grid, F.pad(x, widths), inplace=True)
            return found

        found = loss(filled, mine[0], mine[1:])
        found.backward()
        for one in mine[1:]:
            grid.allreduce(one.grad, out=one.grad)
        value = grid.allreduce(float(found.detach().cpu()))
        pairs = [(one.grad.cpu(), other.grad) for one, other in zip(mine, alone, strict=True)]
        pairs[0] = pairs[0][0], pairs[0][1][(..., *grid.owned)]
        pairs.append((torch.tensor(value), expected.detach()))
    return max(float(abs(one - other).max() / abs(other).max()) for one, other in pairs)
