"""Reductions over the owned cells of fields."""
