"""``halox bench exchange``: halo exchanges of all ranks."""
