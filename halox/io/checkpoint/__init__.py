"""Fields on disk or in S3, written and read by all ranks: a Zarr v3 group of many fields, or a ``.npy`` file of one.

`Grid.save`, `Grid.load` and `halox.Output` use it; begin with `calls.py`, then `saving.py`, `loading.py`. A whole field
is stored without halos, in shards that follow the blocks of the writing ranks. One rank writes a shard; the others send
it their cells. In a load, each rank reads its cells from all shards that have some. TensorStore does the rest::

    chunks.py    shards of a field: the rank that writes each shard, and the cells of other ranks in it
    fields.py    description of a field: shape, dtype, components, staggering, parity; Zarr metadata
    folder.py    atomic replacement of a checkpoint by the next one, in a file system
    store.py     the Zarr group: metadata, arrays of TensorStore, its errors
    bucket.py    replacement of a checkpoint by the next one, in S3
    moving.py    transfer of cells between fields and arrays, with messages between the ranks
    saving.py    loading.py    npy.py    the formats
    arguments.py    calls.py    checks of arguments, and the calls
    output.py    records.py    series.py    dates.py    records in time: means over windows, rounding, dates
    tables.py    particles, in checkpoints and outputs
"""
