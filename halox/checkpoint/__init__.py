"""Fields on disk: a Zarr v3 group of many, written and read by all ranks, or a ``.npy`` file of one.

Whole fields are stored, halos left out, in chunks that follow the blocks of the ranks that write them. A chunk is
written by one rank, to which others send their cells of it: none where blocks divide evenly, a thin rim of them
elsewhere. It is read by all ranks that own some of it, each its cells, whatever the division::

    chunks.py    which chunks a field has, the rank that moves each, the ranks whose cells it holds, and what they read
    moving.py    cells between fields and chunks, and messages between the ranks
    fields.py    description of a field: shape, dtype, components, staggering, parity; names of dimensions
    store.py     the Zarr group: metadata, chunk files with checksums
    checksum.py  the checksum of a chunk from those of its parts
    threads.py   checksums and waits for the disk beside reads and writes
    folder.py    replacement of a checkpoint by the next one: at once, or not at all
    saving.py    loading.py    npy.py    the calls
"""
