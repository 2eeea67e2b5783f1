"""Reductions of NumPy arrays."""
