"""``halox bench pingpong``: messages between two ranks with a datatype on each side."""
