"""Exchange plans: messages and their paths, agreed with the peers, made once and used in every step.

`halo`, `transpose` and `typed` describe exchanges as drafts: arrays, and messages between the ranks. `making` turns the
drafts of all ranks into plans: `selection` chooses a path for each message by the constants in `costs` (`calibration`
reads measured ones), and the paths make the channels that a `Runner` runs. `cache` keeps the runners of a grid; a
`Plan` shows one to users, and `loops` runs it with a step of the user's. `walls` plans the halos beyond the grid.

`Grid` calls `grid_plans`. Begin with `halo`, then `making` and `runner`.
"""
