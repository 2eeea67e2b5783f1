"""``halox bench pingpong``, ``ddtbench`` and ``scatter_gather``: typed messages there and back between two ranks."""
