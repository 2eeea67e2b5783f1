"""Input and output of a grid's fields: whole arrays on one rank, and checkpoints on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from halox.checkpoint import npy
from halox.checkpoint.arguments import (
    Given,
    Progress,
    array_attrs_of,
    attrs_of,
    coords_of,
    dims_of,
    fields_of,
    names_of,
    path_of,
    progress_of,
)
from halox.checkpoint.bucket import BucketPath
from halox.checkpoint.fields import spec_text
from halox.checkpoint.loading import LOADING, Loaded, load
from halox.checkpoint.saving import SAVING, Request, guarded, save
from halox.checkpoint.store import codecs_of, load_tensorstore
from halox.decomposition import Decomposition, FieldLayout
from halox.dimension_names import FACE
from halox.errors import FieldError, MismatchError
from halox.field_layouts import FieldLayouts
from halox.field_options import FieldOptions, dtype_text
from halox.gathering import gather
from halox.runtime.arrays import Array, DType, check_elements_apart
from halox.runtime.call_guard import one_thread
from halox.runtime.world import World
from halox.scattering import Target, components_of, scatter
from halox.values import shown

if TYPE_CHECKING:
    from halox.runtime.array_types import Field


class GridData:
    """Gather, scatter, save and load as methods of a grid."""

    grid_shape: tuple[int, ...]
    _world: World
    _decomposition: Decomposition
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
            A path on a file system that all ranks share. Missing parent folders are made. A checkpoint of the same name
            is replaced, but only after the new checkpoint is complete. A name that ends in ``.npy`` is a file of one
            field, without checksums, attributes and coordinates. Names of netCDF and HDF5 (``.nc``, ``.h5``, ...) are
            errors.
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
        compressors : str, codec or sequence, optional
            Codecs of `zarr.codecs`, or their names, such as "zstd". By default chunks are not compressed.
        progress : callable, optional
            Called on each rank as ``progress(done_bytes, total_bytes)`` after each chunk, with the bytes of this rank.
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
            If zarr is not installed.

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
        self._save(
            path,
            fields,
            attrs=attrs,
            dims=dims,
            coords=coords,
            compressors=compressors,
            progress=progress,
            named=named,
        )

    @one_thread
    def _save(
        self,
        path: object,
        fields: object,
        *,
        attrs: object = None,
        dims: Sequence[str] | None = None,
        coords: object = None,
        compressors: object = None,
        progress: object = None,
        named: Mapping[str, object] | None = None,
        array_attrs: Mapping[str, object] | None = None,
    ) -> None:
        """Save as in `save`; ``array_attrs`` has the attributes of fields and coordinates."""
        self._world.begin("save")

        def check() -> tuple[Request, dict[str, object]]:
            where = path_of(path, written=True)
            given = fields_of(self._layouts, fields, named or {}, written=False)
            if not given:
                raise FieldError("no field given; write grid.save(path, u=u)")
            names = dims_of(dims, len(self.grid_shape))
            lengths = self._lengths(names)
            codecs = codecs_of(compressors)
            if where.suffix != npy.SUFFIX:
                load_tensorstore()
            elif len(given) > 1 or attrs or coords or codecs:
                raise FieldError(
                    f"{where.name}: a .npy file holds one field, without attrs, coords and compressors; save a group "
                    "instead, under a name without .npy"
                )
            request = Request(
                where,
                given,
                self.grid_shape,
                names,
                coords_of(coords, names, lengths, given),
                attrs_of(attrs),
                array_attrs_of(coords, array_attrs or {}),
                codecs,
                progress_of(progress),
            )
            return request, _said(where, given, dims=names, compressors=codecs)

        request, said = self._world.prepare(check, SAVING)
        compare(said, "save")
        if isinstance(request.path, Path) and request.path.suffix == npy.SUFFIX:
            (given,) = request.fields.values()
            npy.save(self._world, request.path, given, request.progress)
        else:
            save(self._world, request)

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
            If zarr is not installed.

        Notes
        -----
        Collective; blocks. Loaded cells have exactly the saved bits. Halos are not filled: call `exchange`. Each rank
        reads its own cells. A compressed chunk is read by one rank, which sends other ranks their cells. Needs at most
        256 MiB of memory per rank.
        """
        self._world.begin("load")

        def check() -> tuple[
            tuple[Path | BucketPath, dict[str, Given], tuple[str, ...] | None, Progress | None],
            dict[str, object],
        ]:
            where = path_of(path, written=False)
            given = fields_of(self._layouts, into, named, written=True)
            wanted = names_of(names)
            if where.suffix != npy.SUFFIX:
                load_tensorstore()
            elif len(given) + len(wanted or ()) > 1:
                raise FieldError(f"{where.name}: a .npy file holds one field; ask for one")
            found = where, given, wanted, progress_of(progress)
            return found, _said(where, given, names=wanted)

        (where, given, wanted, tell), said = self._world.prepare(check, LOADING)
        compare(said, "load")

        def new(dtype: DType, options: dict[str, Any]) -> tuple[Field, FieldLayout]:
            field = self._new(dtype, options)
            return field, self._layouts.find(field)

        if isinstance(where, Path) and where.suffix == npy.SUFFIX:
            return self._load_npy(where, given, wanted, tell)
        return load(self._world, where, self.grid_shape, wanted, given, new, tell)

    def _load_npy(
        self,
        path: Path,
        into: dict[str, Given],
        names: tuple[str, ...] | None,
        progress: Progress | None,
    ) -> Loaded:
        """Return the field of a ``.npy`` file, under the requested name or the file's name."""
        with npy.opened_file(self._world, path) as found:
            shape, dtype = found[1].shape, found[1].dtype

            def options() -> FieldOptions:
                for name, given in into.items():
                    if given.found.dtype != dtype:
                        raise FieldError(
                            f"{name}: dtype {dtype} in {path}, {given.found.dtype} in the field; give a field like "
                            "the one saved, or let load make it"
                        )
                if into:
                    return {}
                call = f"grid.load({str(path)!r}, u=grid.zeros({dtype_text(dtype)}, {{}}))"
                return components_of(shape, self.grid_shape, str(path), call)

            layout = guarded(self._world, options, f"reading {path}", LOADING)
            if into:
                ((name, given),) = into.items()
                field = given.array
            else:
                (name,) = names or (path.stem,)
                field = self._new(dtype, layout)
            npy.load(self._world, path, found, field, self._layouts.find(field), progress)
        return Loaded({name: field}, {})

    def _lengths(self, dims: Sequence[str]) -> dict[str, int]:
        """Return the length of each dimension that may have coordinates."""
        axes = self._decomposition.axes
        faces = {f"{name}{FACE}": axis.points(True) for name, axis in zip(dims, axes, strict=True)}
        return dict(zip(dims, self.grid_shape, strict=True)) | faces


def _said(path: Path | BucketPath, fields: dict[str, Given], **more: object) -> dict[str, object]:
    """Return the arguments that must be the same on all ranks."""
    kinds = {name: f"{f.found.dtype} {spec_text(f.layout.spec)}" for name, f in fields.items()}
    return {"path": str(path), "fields": sorted(fields), **kinds, **more}


def compare(said: Sequence[Mapping[str, object]], call: str) -> None:
    """Raise `MismatchError` if the arguments of the ranks differ; local, with the same result on all ranks."""
    first = said[0]
    for rank, other in enumerate(said):
        for name in first:
            if other.get(name) != first[name]:
                raise MismatchError(
                    f"{call}: {name} differs between ranks: rank 0 has {shown(first[name])}, rank {rank} has "
                    f"{shown(other.get(name))}; give the same on all ranks"
                )
