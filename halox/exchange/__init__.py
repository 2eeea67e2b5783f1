"""Exchange plans: messages and their paths, agreed with the peers, made once and used in every step.

`halo`, `transpose` and `typed` describe exchanges as drafts: arrays, and messages between the ranks. `making` turns the
ranks' drafts into plans: `selection` chooses a path for each message by the constants in `costs` (`calibration` reads
measured ones), and the paths make the channels that a `Plan` runs. `cache` keeps the plans of a grid.
"""
