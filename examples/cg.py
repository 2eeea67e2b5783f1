"""Poisson's equation in a closed box by conjugate gradients; a GPU repeats the iterations without the host.

The solution is a product of parabolas. On four ranks, with a picture: ``halox run examples/cg.py -n 4 --png cg.png``.
"""

import argparse
import sys

import halox


def main(arguments: list[str] | tuple[str, ...] = ()) -> float:
    """Run, and return the largest error."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", type=int, nargs=2, default=(120, 80), metavar="N")
    parser.add_argument("--png", metavar="FILE", help="write a picture")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    options = parser.parse_args(arguments)
    with halox.Grid(options.cells, halo=1, device=options.device) as grid:
        xp = grid.xp
        x, r, p, q = (grid.zeros("f8") for _ in range(4))  # r = b - A x, q = A p
        rr, pq, new, stop = xp.zeros(()), xp.zeros(()), xp.zeros(()), xp.zeros((), bool)
        sides = zip(grid.indices(), grid.grid_shape, strict=True)
        a, b = (4 * (i + 1.0) * (n - i) / (n + 1) ** 2 for i, n in sides)
        bend_x, bend_y = (8 / (n + 1) ** 2 for n in grid.grid_shape)
        grid.interior(r)[...] = bend_x * b + bend_y * a
        p[...] = r
        grid.dot(r, r, out=rr)
        exchange, tolerance = grid.plan(p, corners=False), 1e-30 * float(rr)

        def step() -> None:
            exchange()
            around = p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:]
            q[1:-1, 1:-1] = 4 * p[1:-1, 1:-1] - around
            grid.dot(p, q, out=pq)
            x[...] += rr / pq * p
            r[...] -= rr / pq * q
            grid.dot(r, r, out=new)
            p[...] = r + new / rr * p
            rr[...] = new
            xp.less(new, tolerance, out=stop)

        steps = grid.loop(step, until=stop, most=2000)()
        grid.interior(q)[...] = abs(grid.interior(x) - a * b)
        error, whole = float(grid.max(q)), grid.gather(x) if options.png else None
        if grid.rank == 0:
            print(f"{grid.size} rank(s), {grid.device}: {steps} steps; largest error {error:.1e}")
    if whole is not None:
        from matplotlib.figure import Figure

        figure = Figure(layout="constrained")
        figure.subplots().imshow(whole.T, origin="lower")
        figure.savefig(options.png)
    if not error <= 1e-13:
        raise SystemExit("the result is wrong")
    return error


if __name__ == "__main__":
    main(sys.argv[1:])
