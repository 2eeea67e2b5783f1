"""Fields on disk or in S3, written and read by all ranks: a Zarr v3 group of many fields, or a ``.npy`` file of one.

Whole fields are stored without halos, in shards that follow the blocks of the writing ranks. One rank writes a shard,
and other ranks send this rank their cells of the shard. Equal blocks need no such messages; unequal blocks need
messages of a few cells at their borders. Every rank that owns cells of a shard reads these cells, in any division.
TensorStore stores the cells: chunks, compression, checksums, threads, files and objects::

    chunks.py    shards of a field: the rank that writes each shard, and the cells of other ranks in it
    fields.py    description of a field: shape, dtype, components, staggering, parity; Zarr metadata
    folder.py    atomic replacement of a checkpoint by the next one, in a file system
    store.py     the Zarr group: metadata, arrays of TensorStore, its errors
    bucket.py    replacement of a checkpoint by the next one, in S3
    moving.py    cells between fields and arrays, and messages between the ranks
    saving.py    loading.py    npy.py    the formats
    arguments.py    calls.py    checks of arguments, and the calls
"""
