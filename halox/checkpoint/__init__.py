"""Fields on disk: a Zarr v3 group of many, written and read by all ranks, or a ``.npy`` file of one.

Whole fields are stored, halos left out, in chunks that follow the blocks of the ranks that write them. A chunk is
written and read by one rank, which exchanges with the others the cells that are not its own: none where blocks divide
evenly, a thin rim of them elsewhere, and any number where another division reads a checkpoint::

    chunks.py    which chunks a field has, the rank that moves each, and the ranks whose cells it holds
    moving.py    cells between fields and chunks, and messages between the ranks
    fields.py    description of a field: shape, dtype, components, staggering, parity; names of dimensions
    store.py     the Zarr group: metadata, chunk files with checksums
    folder.py    replacement of a checkpoint by the next one: at once, or not at all
    saving.py    loading.py    npy.py    the calls
"""
