"""Input and output of a grid's fields: whole arrays on one rank, and checkpoints on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack

from halox.checkpoint import calls
from halox.checkpoint.arguments import Progress
from halox.checkpoint.calls import LoadOptions, SaveOptions
from halox.checkpoint.loading import Loaded
from halox.decomposition import FieldLayout
from halox.errors import FieldError
from halox.field_layouts import FieldLayouts
from halox.field_options import FieldOptions
from halox.gathering import gather
from halox.runtime.arrays import Array, DType, check_elements_apart
from halox.runtime.call_guard import one_thread
from halox.runtime.world import World
from halox.scattering import Target, scatter

if TYPE_CHECKING:
    from halox.runtime.array_types import Field


class GridData:
    """Gather, scatter, save and load as methods of a grid."""

    grid_shape: tuple[int, ...]
    _world: World
    _layout: FieldLayout
    _layouts: FieldLayouts
    _layout_of: Callable[[FieldOptions], FieldLayout]
    _new: Callable[..., Field]

    @one_thread
    def gather(self, field: object, root: int = 0) -> Array | None:
        """Collect the owned cells of all ranks on one rank.

        Parameters
        ----------
        field : array
            A field with the same dtype and layout on all ranks.
        root : int
            The rank that gets the cells; the same on all ranks.

        Returns
        -------
        numpy.ndarray or None
            The whole field, in host memory, on rank ``root``; None on other ranks. A field of one parity stays compact,
            with half the cells along the last grid axis.

        Raises
        ------
        FieldError
            If the array does not fit the grid, or ``root`` is not a rank.
        MismatchError
            If dtypes, layouts or roots differ between ranks.
        HaloxError
            Also if rank ``root`` has too little memory for the whole field.
        ExchangeTimeoutError
            If a rank does not make the matching call within ``HALOX_TIMEOUT`` seconds, or stops during the gather.


        Notes
        -----
        Collective; blocks. Rank ``root`` needs memory for the whole field and 64 MiB. Other ranks need 64 MiB if their
        cells are not contiguous, and memory for all of their cells if the field is on a GPU.
        """
        self._world.begin("gather")
        return gather(self._world, field, self._layouts.find, root)

    @one_thread
    def scatter(
        self, /, whole: object, root: int = 0, *, out: Any = None, **layout: Unpack[FieldOptions]
    ) -> Any:
        """Distribute a whole array of one rank: the inverse of `gather`.

        Parameters
        ----------
        whole : array or None
            On rank ``root``, an array of all cells of the grid, without halo, in the shape that `gather` returns; any
            fixed-size dtype. A `numpy.memmap` is read part by part. The argument is ignored on other ranks.
        root : int
            The rank that has the whole array; the same on all ranks.
        out : array, optional
            A field of the grid to fill; given on all ranks or on no rank. By default a new field is made.
        **layout
            Layout options of a new field, see `zeros`. Without options, component axes are inferred from the array's
            shape.

        Returns
        -------
        array
            The field. The halo of a new field is zero, the halo of ``out`` is not changed; `exchange` fills either.

        Raises
        ------
        FieldError
            If ``root`` is not a rank; if its array is missing or has another shape; if ``out`` is not a field of the
            grid, is read-only, or is given together with layout options.
        MismatchError
            If roots or layouts differ between ranks, or ``out`` has another dtype than the array.
        ExchangeTimeoutError
            If a rank does not make the matching call within ``HALOX_TIMEOUT`` seconds, or stops during the scatter.

        Notes
        -----
        Collective; blocks. Needs memory for the field and 64 MiB. Blocks on a GPU are filled through page-locked
        memory.

        Examples
        --------
        >>> import halox, numpy as np
        >>> with halox.Grid((4, 6), device="cpu") as grid:
        ...     u = grid.scatter(np.arange(24.0).reshape(4, 6) if grid.rank == 0 else None)
        ...     grid.sum(u)
        np.float64(276.0)
        """
        self._world.begin("scatter")

        def target() -> Target:
            if out is None:
                return Target(None, None, self._layout_of(layout) if layout else None, layout)
            if layout:
                raise FieldError(
                    f"out and {', '.join(layout)} were given: the field has its layout; leave out one of the two"
                )
            found, known = self._layouts.read(out)
            if not found.writable:
                raise FieldError("out: the array is read-only; give one that can be written")
            check_elements_apart(found, "out")
            return Target(out, found, known, {})

        def find(field: object) -> FieldLayout:
            return self._layout if field is None else self._layouts.find(field)

        def new(dtype: DType | None, options: FieldOptions) -> object:
            return self._new(dtype, options)

        return scatter(self._world, whole, root, target, find, new)

    def save(
        self,
        path: str | PathLike[str],
        fields: Mapping[str, object] | None = None,
        /,
        *,
        attrs: Mapping[str, object] | None = None,
        dims: Sequence[str] | None = None,
        coords: Mapping[str, object] | None = None,
        compressors: object = None,
        progress: Progress | None = None,
        **named: object,
    ) -> None:
        """Write fields to a checkpoint, all ranks together: a Zarr v3 group, or a ``.npy`` file of one field.

        Parameters
        ----------
        path : str or path
            A path on a file system that all ranks share, or ``s3://bucket/name``. Missing parent folders are made. A
            checkpoint of the same name is replaced, but only after the new checkpoint is complete. A name that ends in
            ``.npy`` is a file of one field, without checksums, attributes and coordinates. Names of netCDF and HDF5
            (``.nc``, ``.h5``, ...) are errors.
        fields : mapping of str to array, optional
            Fields by name, with any dtypes and layouts; or by keyword, as in ``u=u``.
        attrs : mapping, optional
            Attributes such as time and step, with values that JSON supports. The attributes of rank 0 are stored.
        dims : sequence of str, optional
            Names of the grid axes; ("x", "y", "z", "t") by default. The dimension of a staggered axis "x" is called
            "x_face".
        coords : mapping of str to array, optional
            Coordinates of the whole grid by dimension. The coordinates of rank 0 are stored; labelled arrays keep their
            attributes.
        compressors : str, dict, codec or sequence, optional
            Zarr codecs: their names, such as "zstd", their JSON, such as ``{"name": "zstd", "configuration": {"level":
            3}}``, or codecs of `zarr.codecs`. By default chunks are not compressed.
        progress : callable, optional
            Called on each rank as ``progress(done_bytes, total_bytes)`` after each shard, with the bytes of this rank.
        **named
            Further fields.

        Raises
        ------
        FieldError
            If a field does not fit the grid, or an argument is malformed.
        MismatchError
            If paths, fields or options differ between ranks.
        CheckpointError
            If the checkpoint cannot be written: no permission, no space, another run is writing it, a file or folder
            that is not a checkpoint has this name, or it is a name of netCDF or HDF5. An existing checkpoint then stays
            unchanged.
        MissingPackageError
            If tensorstore is not installed.

        Notes
        -----
        Collective; blocks until all data is on disk (``fsync``). Owned cells are stored, halos are not. Needs at most
        256 MiB of memory per rank. Fields on a GPU are copied through page-locked memory: while one part is written,
        the next part is copied.

        Examples
        --------
        >>> import halox, tempfile
        >>> with halox.Grid((8, 6), device="cpu") as grid, tempfile.TemporaryDirectory() as folder:
        ...     grid.save(f"{folder}/run.zarr", u=grid.ones(), attrs={"step": 7})
        ...     found = grid.load(f"{folder}/run.zarr")
        ...     grid.sum(found["u"]), found.attrs
        (np.float64(48.0), {'step': 7})
        """
        options = SaveOptions(attrs, dims, coords, compressors, progress)
        self._save(path, fields, named, options)

    @one_thread
    def _save(
        self, path: object, fields: object, named: Mapping[str, object], options: SaveOptions
    ) -> None:
        self._world.begin("save")
        calls.save(self._world, self._layouts, path, fields, named, options)

    @one_thread
    def load(
        self,
        path: str | PathLike[str],
        into: Mapping[str, object] | None = None,
        /,
        *,
        names: str | Sequence[str] | None = None,
        progress: Progress | None = None,
        **named: object,
    ) -> Loaded:
        """Read fields of a checkpoint, on any number of ranks, in any division of the same cells.

        Parameters
        ----------
        path : str or path
            The path given to `save`.
        into : mapping of str to array, optional
            Fields to fill, by name; or by keyword, as in ``u=u``.
        names : str or sequence of str, optional
            Fields to load into new arrays. By default all fields, or no fields if there are fields to fill.
        progress : callable, optional
            The same as for `save`.
        **named
            Further fields to fill.

        Returns
        -------
        Loaded
            A dict of the fields; its attribute ``attrs`` has the saved attributes. New fields have the grid's halo.

        Raises
        ------
        CheckpointError
            If the checkpoint does not exist, has another grid shape or format, lacks a requested field, is truncated or
            damaged, or was replaced while it was read. The contents of the fields to fill are then undefined.
        FieldError
            If a field to fill does not match the saved field, or is read-only.
        MismatchError
            If paths or fields differ between ranks.
        MissingPackageError
            If tensorstore is not installed.

        Notes
        -----
        Collective; blocks. Loaded cells have exactly the saved bits. Halos are not filled: call `exchange`. Each rank
        reads its own cells. Needs at most 256 MiB of memory per rank.
        """
        self._world.begin("load")

        def new(dtype: DType, options: dict[str, Any]) -> tuple[Field, FieldLayout]:
            field = self._new(dtype, options)
            return field, self._layouts.find(field)

        options = LoadOptions(into, named, names, progress)
        return calls.load(self._world, self._layouts, self.grid_shape, new, path, options)
