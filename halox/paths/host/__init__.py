"""The ``host`` path: NumPy arrays."""
