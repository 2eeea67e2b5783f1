"""Reductions of GPU arrays."""
