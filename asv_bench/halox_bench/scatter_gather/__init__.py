"""``halox bench scatter_gather``: strided messages between two ranks, without packing and with."""
