"""``halox bench``: the library's parts on this machine, beside hand-written code."""
