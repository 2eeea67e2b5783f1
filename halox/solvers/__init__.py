"""What solvers need of a grid: coarser grids for multigrid methods, and fields as vectors of linear operators.

`Grid.coarsen` and `CoarseGrid` call `coarsening`, and `Grid.linear_operator` calls `linear_operators`; both work on
domains. Begin with `coarsening`.
"""
