"""Fields on disk, written and read by all ranks: a Zarr v3 group of many fields, or a ``.npy`` file of one field.

Whole fields are stored without halos, in chunks that follow the blocks of the writing ranks. One rank writes a chunk,
and other ranks send this rank their cells of the chunk. Equal blocks need no such messages; unequal blocks need
messages of a few cells at their borders. Every rank that owns cells of a chunk reads these cells, in any division::

    chunks.py    chunks of a field: the rank that moves each chunk, and the cells of other ranks in it
    moving.py    cells between fields and chunks, and messages between the ranks
    fields.py    description of a field: shape, dtype, components, staggering, parity; names of dimensions
    store.py     the Zarr group: metadata, chunk files with checksums
    checksum.py  checksum of a chunk from the checksums of its parts
    threads.py   checksums and waits for the disk, concurrent with reads and writes
    folder.py    atomic replacement of a checkpoint by the next one
    saving.py    loading.py    npy.py    the calls
"""
