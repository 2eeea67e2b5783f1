"""What all rooms above rest on: the ranks, their common memory, their arrays. Nothing here knows of grids or messages.

- Ranks: a `World` (`world`) has a private communicator (`communicator`, `duplicates`), on which an error of one rank is
  raised on all by `attempt`, `gather` and `total`, and no wait is longer than ``HALOX_TIMEOUT`` (`waiting`, `status`).
- Memory: a `Context` (`context`) has what the plans of a world share: the arenas of host and device memory that ranks
  map from one another (`arena`, `device_arena`, both over `segments`), and what is known of their GPUs (`topology`).
- Arrays: `arrays.describe` makes a `Described` of an array of any library; `gpu` has CUDA.

Begin with `World.attempt`, then `Context`.
"""
