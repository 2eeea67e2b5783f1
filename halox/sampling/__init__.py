"""Points and particles of a grid, and random numbers by global index.

`locating` turns coordinates into fractional indices, and `weights` those into cells and weights, for reading (linear
interpolation) and for adding, its adjoint. `device_points` plans the kernel. `random_numbers` is a counter-based
generator. `points` is the class `halox.Points`; `Grid.locate` and `Grid.random` call this room. Begin with `weights`.

`particles` is the class `halox.Particles`. `migration` and `device_migration` move particles between ranks, `clouds`
reads fields and adds to them.
"""
