"""Points of a grid, and random numbers by global index."""
