"""The protocol ``mlx5_umr``: network adapters gather and scatter, without packing, between ranks on different nodes.

After Suresh et al. 2022, section IV. Begin at `channel`, which a plan makes with its peers.

- `windows`: a message is cut at the same bytes at both ends, in windows of a chunk size on which both ends agree.
- `keys`: a window is mapped to a memory key from a pool made in advance; both ends cache the keys of a layout.
- `engine`: registers memory, maps keys by user-mode memory registration (UMR), and writes from key to key.
- `gpu`: arrays on GPUs. `probe`: a trial of an adapter, for ``halox probe mlx5``.

`halox.runtime.mlx5` opens the adapters. This code has never run on hardware.
"""
