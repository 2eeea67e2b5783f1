"""A convolution learns the stencil of the heat equation, divided among ranks; compared with the stencil. Needs PyTorch.

The samples are fields of random numbers, and these fields some steps of the heat equation later. Each rank has its
cells of all fields, and a copy of the kernel, which it applies once for each step, after an exchange. Gradients pass
through the exchanges back to the ranks that own the cells. Their sum over the ranks is the gradient of a run on one
rank, so that all ranks take the same steps.

Alone: ``python examples/convolution.py``; on four ranks, with a picture:
``halox run examples/convolution.py -n 4 --png convolution.png``.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import halox
import halox.torch

RATE = 0.1  # diffusivity * time step / cell size squared
STENCIL = [[0.0, RATE, 0.0], [RATE, 1 - 4 * RATE, RATE], [0.0, RATE, 0.0]]
FIELDS = 4
STEPS = 2  # of the heat equation from the input to the output of a sample


def step(u: Any) -> Any:
    """Return the temperature of the cells one time step later."""
    around = u[:, :-2, 1:-1] + u[:, 2:, 1:-1] + u[:, 1:-1, :-2] + u[:, 1:-1, 2:]
    return u[:, 1:-1, 1:-1] + RATE * (around - 4 * u[:, 1:-1, 1:-1])


def main(arguments: Sequence[str] = ()) -> float:
    """Run, and return the largest error of the kernel."""
    options = parse(arguments)
    with halox.Grid(options.cells, periodic=True, device=options.device) as grid:
        u = grid.random(1, components=FIELDS)
        start = torch.from_dlpack(grid.interior(u)).clone()[:, None]  # one channel
        for _ in range(STEPS):
            grid.exchange(u)
            grid.interior(u)[...] = step(u)
        target = torch.from_dlpack(grid.interior(u))[:, None]

        kernel, losses = torch.zeros_like(start[:1, :, :3, :3]), []
        kernel[..., 1, 1] = 1
        optimizer = torch.optim.LBFGS(
            [kernel.requires_grad_()],
            max_iter=options.iterations,
            tolerance_grad=0,
            tolerance_change=0,
            line_search_fn="strong_wolfe",
        )

        def loss() -> float:
            x = start
            for _ in range(STEPS):
                padded = torch.nn.functional.pad(x, (1, 1, 1, 1))
                x = torch.nn.functional.conv2d(
                    halox.torch.exchange(grid, padded, inplace=True), kernel
                )
            mine = ((x - target) ** 2).sum() / (FIELDS * math.prod(grid.grid_shape))
            optimizer.zero_grad()
            mine.backward()
            grid.allreduce(kernel.grad, out=kernel.grad)
            losses.append(grid.allreduce(mine.item()))
            return losses[-1]

        optimizer.step(loss)
        learned = kernel.detach().cpu()[0, 0]
        error = float(abs(learned - torch.tensor(STENCIL, dtype=learned.dtype)).max())
        if grid.rank == 0:
            print(f"{grid.size} rank(s), {len(losses)} gradients: largest error {error:.1e}")
            if options.png:
                draw(options.png, learned.numpy(), losses)
    if not error < 1e-12:
        raise SystemExit("the result is wrong")
    return error


def draw(path: Path, kernel: Any, losses: Sequence[float]) -> None:
    """Draw the kernel, and the losses."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    left.imshow(kernel, cmap="viridis")
    for i, j in itertools.product(range(3), repeat=2):
        left.text(j, i, f"{kernel[i, j]:z.2f}", color="gray", ha="center", va="center")
    left.set(title="kernel", xticks=[], yticks=[])
    right.semilogy(losses)
    right.set(title="loss", xlabel="gradients")
    figure.savefig(path)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", type=int, nargs=2, default=(64, 48), metavar="N")
    parser.add_argument("--iterations", type=int, default=25)
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a picture")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
