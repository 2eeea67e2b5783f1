"""``halox bench pack``: packing of many layouts on one process."""
