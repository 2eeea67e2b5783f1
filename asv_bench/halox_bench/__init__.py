"""``halox bench``: what the library's parts cost on this machine, beside what users write by hand."""
