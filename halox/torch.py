"""Exchanges of PyTorch's tensors with gradients: `exchange` is a function of `torch.autograd`; needs PyTorch.

An exchange is linear, apart from the numbers of its boundaries, and an accumulation is its adjoint. So `_Exchange` and
`_Accumulate` are the backward functions of each other, for gradients of any order. Only programs import this module.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple

from halox.domain.domain import domain_of
from halox.errors import FieldError, MissingPackageError, raising
from halox.grid import Grid
from halox.plans.plan import Plan, place_of
from halox.runtime.call_guard import short_errors
from halox.runtime.gpu.cuda import cupy
from halox.runtime.world import World

try:
    import torch
except ImportError as error:
    raise MissingPackageError("halox.torch needs PyTorch: `pip install torch`") from error


@torch.compiler.disable  # type: ignore[untyped-decorator]
@short_errors
def exchange(
    grid: Grid[Any] | Plan, /, *tensors: torch.Tensor, inplace: bool = False, **options: Any
) -> Any:
    """Return tensors with the neighbours' cells in their halos; gradients flow back to the ranks that own the cells.

    Parameters
    ----------
    grid : Grid or Plan
        A grid, or a plan of `Grid.plan` for arrays of the tensors' shapes, dtypes and strides.
    *tensors : torch.Tensor
        Tensors of the padded shape, with any axes before and behind it, such as (N, C, H, W) on a grid of two axes.
    inplace : bool
        Whether to fill the halos of the tensors themselves instead of copies.
    **options
        ``corners`` and ``axes`` of `Grid.exchange`; not for a plan.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        The tensor, or the tensors if several were given.

    Raises
    ------
    FieldError
        Also if an argument is not a tensor, or is a leaf that requires gradients and would change in place.

    Notes
    -----
    In PyTorch's current stream. Every rank must make the same exchanges, and also go back through the same ones.
    """
    if isinstance(grid, Plan):
        fill: Callable[..., None] = grid
        place = place_of(grid)
    else:
        domain = domain_of(grid)
        fill, place = grid.exchange, (domain.world, domain.device_id)
    halos = _Halos(partial(fill, **options), partial(grid.accumulate, **options), *place)
    halos.check(tensors, inplace)
    copies = _Exchange.apply(halos, inplace, False, *tensors)
    filled = tensors if inplace else copies
    return filled[0] if len(tensors) == 1 else filled


class _Halos(NamedTuple):
    """Exchange and accumulation of a grid or a plan."""

    fill: Callable[..., None]
    add: Callable[..., None]
    world: World
    device: int | None

    def check(self, tensors: Sequence[object], inplace: bool) -> None:
        """Raise `FieldError` on all ranks if tensors are invalid on this one."""
        error = None if tensors else "tensors: give one or more"
        for number, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                error = f"tensors[{number}] must be a torch.Tensor, got {type(tensor).__name__}"
            elif inplace and tensor.is_leaf and tensor.requires_grad and torch.is_grad_enabled():
                error = (
                    f"tensors[{number}] is a leaf that requires gradients; leave out inplace=True"
                )
        if error is not None:
            with self.world.guard:
                self.world.begin("exchange")
                self.world.attempt(raising(FieldError(error)), "exchange")

    def run(self, call: Callable[..., None], tensors: Sequence[torch.Tensor]) -> None:
        """Exchange or accumulate tensors in place, in PyTorch's current stream."""
        if self.device is None:
            call(*map(_array, tensors))
            return
        stream = torch.cuda.current_stream(self.device).cuda_stream
        with cupy().cuda.Device(self.device), _cupy_stream(stream, self.device):
            call(*map(_array, tensors))


@cache
def _cupy_stream(stream: int, device: int) -> Any:
    with warnings.catch_warnings():  # deprecated in CuPy 14, whose new function CuPy 13 lacks
        warnings.simplefilter("ignore", DeprecationWarning)
        return cupy().cuda.ExternalStream(stream, device)


def _array(tensor: torch.Tensor) -> Any:
    """View a tensor on the host as a NumPy array, for speed; CuPy's from_dlpack states a wrong size of its memory."""
    with suppress(Exception):
        return tensor.detach().numpy() if tensor.is_cpu else tensor.detach()
    return tensor.detach()  # for halox to refuse on all ranks


class _Exchange(torch.autograd.Function):  # type: ignore[misc]
    """Exchange of tensors or of copies; the ``linear`` one leaves out the numbers of boundaries."""

    @staticmethod
    def forward(ctx: Any, halos: _Halos, inplace: bool, linear: bool, *tensors: Any) -> Any:
        filled = tensors if inplace else tuple([tensor.clone() for tensor in tensors])
        halos.run(halos.fill, filled)
        if linear:
            constant = [torch.zeros_like(tensor) for tensor in filled]
            halos.run(halos.fill, constant)
            for tensor, numbers in zip(filled, constant, strict=True):
                tensor -= numbers
        ctx.halos, ctx.strides = halos, [tensor.stride() for tensor in filled]
        ctx.mark_dirty(*tensors * inplace)
        return filled

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, None, *_Accumulate.apply(ctx.halos, ctx.strides, *gradients)


class _Accumulate(torch.autograd.Function):  # type: ignore[misc]
    """Accumulation of copies of gradients with the strides of the tensors, which are alike on all ranks."""

    @staticmethod
    def forward(ctx: Any, halos: _Halos, strides: Any, *gradients: Any) -> Any:
        pairs = zip(gradients, strides, strict=True)
        added = tuple([g.new_empty_strided(g.shape, steps).copy_(g) for g, steps in pairs])
        halos.run(halos.add, added)
        ctx.halos = halos
        return added

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, *_Exchange.apply(ctx.halos, False, True, *gradients)
