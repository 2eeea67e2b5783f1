"""Fields on disk or in S3, written and read by all ranks: a Zarr v3 group of many fields, or a ``.npy`` file of one.

`Grid.save` and `Grid.load` call `halox.checkpoint.calls`. Whole fields are stored without halos, in shards that follow
the blocks of the writing ranks. One rank writes a shard, and other ranks send this rank their cells of the shard. Equal
blocks need no such messages; unequal blocks need messages of a few cells at their borders. In a load, each rank reads
the cells that it owns from all shards that contain them, so the grid may be divided in another way. TensorStore does
the rest: chunks, compression, checksums, threads, files and objects::

    chunks.py    shards of a field: the rank that writes each shard, and the cells of other ranks in it
    fields.py    description of a field: shape, dtype, components, staggering, parity; Zarr metadata
    folder.py    atomic replacement of a checkpoint by the next one, in a file system
    store.py     the Zarr group: metadata, arrays of TensorStore, its errors
    bucket.py    replacement of a checkpoint by the next one, in S3
    moving.py    transfer of cells between fields and arrays, with messages between the ranks
    saving.py    loading.py    npy.py    the formats
    arguments.py    calls.py    checks of arguments, and the calls
"""
