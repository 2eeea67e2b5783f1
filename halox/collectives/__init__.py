"""Reductions over the ranks: of arrays, and of the owned cells of fields."""
