"""The Zarr v3 group of a checkpoint: zarr-python writes metadata, this module writes plain chunks.

A chunk without compression is a file of its elements in C order, followed by four bytes of CRC32C, as the codecs
``bytes`` and ``crc32c`` of the v3 specification define. So this module writes and reads it in parts that stay in a
core's cache. Measured with one rank, blocks of 128 MiB with a halo, in the page cache: writing runs at 1.2 GB/s here
(1.2 for ``os.write`` alone) and 0.47 GB/s with zarr-python 3.1, reading at 1.9 and 0.53 GB/s. Chunks with other codecs
are written and read by zarr-python.

zarr-python reads a missing chunk as fill values. Here a missing chunk is an error.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from halox.checkpoint.checksum import CRC_BYTES, PartialChecksum, linear_part
from halox.checkpoint.fields import StoredField
from halox.checkpoint.folder import identity_of
from halox.checkpoint.threads import Aside, Syncer
from halox.errors import CheckpointError, MissingPackageError
from halox.runtime.arrays import Array
from halox.values import shown
from halox.window import as_bytes

FORMAT = 1
"""Version of halox's format, in addition to Zarr's version."""

PREFIX = "halox_"
"""Prefix of the names of halox's attributes."""

_FORMAT, _GRID_SHAPE, _ID = f"{PREFIX}format", f"{PREFIX}grid_shape", f"{PREFIX}id"
_PROC_SHAPE, _BLOCKS = f"{PREFIX}proc_shape", f"{PREFIX}blocks"


@dataclass(frozen=True)
class Contents:
    """Description of a checkpoint, from its metadata.

    ``blocks`` has the cells of each block along each grid axis, for the ranks that saved it; it is empty if not
    recorded. ``identity`` distinguishes checkpoints that were read from the same path.
    """

    grid_shape: tuple[int, ...]
    fields: dict[str, StoredField]
    attrs: dict[str, Any]
    blocks: tuple[tuple[int, ...], ...]
    identity: str = ""


def load_zarr() -> Any:
    """Return zarr-python; raise `MissingPackageError` without zarr-python or its dependency google-crc32c."""
    try:
        import google_crc32c
        import zarr
        from zarr.codecs import Crc32cCodec
    except ImportError as error:
        raise MissingPackageError(
            f"checkpoints need zarr 3.1.4 or newer ({error}); install it with `pip install 'zarr>=3.1.4'`, or save one "
            "field as .npy"
        ) from error
    del google_crc32c, Crc32cCodec
    return zarr


def codecs_of(compressors: object) -> list[Any]:
    """Return the Zarr codecs of the option ``compressors``, without the checksum codec.

    Raises `CheckpointError` for any other object.
    """
    if compressors is None:
        return []
    load_zarr()
    from zarr.abc.codec import BytesBytesCodec
    from zarr.registry import get_codec_class

    found: list[Any] = []
    given = compressors if isinstance(compressors, Sequence) else [compressors]
    for one in [given] if isinstance(given, str) else given:
        codec = one
        if isinstance(one, str):
            try:
                codec = get_codec_class(one)()
            except Exception:
                codec = None
        if not isinstance(codec, BytesBytesCodec):
            raise CheckpointError(
                f"compressors: expected codecs of zarr.codecs from bytes to bytes, or their names, such as 'zstd', got "
                f"{shown(one)}"
            )
        found.append(codec)
    return found


def create(
    path: Path,
    contents: Contents,
    dims: Sequence[str],
    coords: Mapping[str, Array],
    attrs: Mapping[str, Mapping[str, Any]],
    codecs: Sequence[Any],
) -> None:
    """Make a group without chunks in an empty folder; raises OSError.

    ``attrs`` has the user's attributes of fields and coordinates.
    """
    zarr = load_zarr()
    from zarr.codecs import BytesCodec, Crc32cCodec

    own = {
        _FORMAT: FORMAT,
        _ID: uuid4().hex,
        _GRID_SHAPE: list(contents.grid_shape),
        # netCDF has no nested lists: store the blocks of all axes in one list, axis after axis.
        _PROC_SHAPE: [len(sizes) for sizes in contents.blocks],
        _BLOCKS: [size for sizes in contents.blocks for size in sizes],
    }
    group = zarr.create_group(store=str(path), attributes={**contents.attrs, **own}, overwrite=True)
    common = {
        "chunk_key_encoding": {"name": "default", "separator": "."},
        "fill_value": 0,
        "filters": None,
    }
    for field in contents.fields.values():
        shape, chunk, dtype = field.stored_shapes
        group.create_array(
            field.name,
            shape=shape,
            chunks=chunk,
            dtype=dtype,
            serializer=BytesCodec(endian="big" if dtype.str[0] == ">" else "little"),
            compressors=[*codecs, Crc32cCodec()],
            dimension_names=field.dims(dims),
            attributes={**attrs.get(field.name, {}), **field.attributes},
            **common,
        )
    for name, values in coords.items():
        target = group.create_array(
            name,
            shape=values.shape,
            chunks=values.shape,
            dtype=np.dtype(values.dtype.str),  # see StoredField.stored_shapes
            compressors=[Crc32cCodec()],
            dimension_names=(name,),
            attributes=attrs.get(name, {}),
            config={"write_empty_chunks": True},
            **common,
        )
        target[...] = values
    with (
        warnings.catch_warnings()
    ):  # not in the specification yet; xarray warns where it is missing
        warnings.simplefilter("ignore")
        zarr.consolidate_metadata(str(path))


def is_checkpoint(path: Path) -> bool:
    """Whether a folder contains a checkpoint or is empty; does not raise."""
    try:
        if not any(path.iterdir()):
            return True
        return _FORMAT in load_zarr().open_group(str(path), mode="r").attrs
    except Exception:  # not a checkpoint
        return False


def read(path: Path, name: Path) -> Contents:
    """Return the description of the checkpoint in a folder; raises `CheckpointError`, which names ``name``."""
    zarr = load_zarr()
    try:
        group = zarr.open_group(str(path), mode="r")
        attributes = dict(group.attrs)
    except Exception as error:  # of many kinds
        if type(error).__name__ == "ContainsArrayError":
            raise CheckpointError(
                f"{name} is one field of a checkpoint; give the path of the whole, {name.parent}, and the field's name"
            ) from error
        raise CheckpointError(
            f"{name} is no Zarr group, or its metadata is damaged ({type(error).__name__}: "
            f"{str(error).replace(str(path), str(name))}); give the path of a checkpoint that grid.save has written"
        ) from error
    version = attributes.get(_FORMAT)
    if version != FORMAT:
        raise CheckpointError(
            f"{name}: expected {_FORMAT}={FORMAT} among the group's attributes, found {version!r}; "
            + (
                "it was written by a newer version of halox: use that one"
                if isinstance(version, int)
                else "only groups that grid.save has written can be loaded"
            )
        )
    try:
        fields = {
            key: _field(key, array, name)
            for key, array in sorted(group.arrays())
            if any(attribute.startswith(PREFIX) for attribute in array.attrs)
        }
        grid_shape = tuple(map(int, attributes[_GRID_SHAPE]))
        sizes = iter(attributes.get(_BLOCKS, ()))
        blocks = tuple(
            tuple(int(next(sizes)) for _ in range(parts))
            for parts in attributes.get(_PROC_SHAPE, ())
        )
        # Earlier versions wrote no id.
        identity = attributes.get(_ID) or identity_of(path / "zarr.json")
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{name}: its metadata is damaged ({type(error).__name__}: {error}); use an earlier checkpoint"
        ) from error
    user = {key: value for key, value in attributes.items() if not key.startswith(PREFIX)}
    return Contents(grid_shape, fields, user, blocks, str(identity))


def check_array(folder: Path, name: Path, field: StoredField) -> None:
    """Raise `CheckpointError` if the array of a field is missing, or its metadata differ from the group's metadata."""
    _compare(_array(folder, name, field.name, "r"), field, name / field.name / "zarr.json")


def _array(folder: Path, name: Path, field: str, mode: str) -> Any:
    """Return the array of a field; raises `CheckpointError`."""
    try:
        return load_zarr().open_array(folder / field, mode=mode, zarr_format=3)
    except Exception as error:  # of many kinds
        raise CheckpointError(
            f"{name / field / 'zarr.json'} is missing or damaged ({type(error).__name__}); use an earlier checkpoint"
        ) from error


def _field(key: str, array: Any, name: Path) -> StoredField:
    """Return the description of a field from the group's metadata of its array."""
    found = StoredField.read(key, array.shape, array.chunks, array.attrs, is_plain=_is_plain(array))
    _compare(array, found, name / "zarr.json")
    return found


def _compare(array: Any, field: StoredField, file: Path) -> None:
    """Raise `CheckpointError` if the metadata of an array, read from ``file``, do not describe the field."""
    shape, chunk, dtype = field.stored_shapes
    orders = {"<": "little", ">": "big", "|": None}
    codec: Any = next((codec for codec in _codecs(array) if codec["name"] == "bytes"), {})
    order = codec.get("configuration", {}).get("endian") if dtype.itemsize > 1 else None
    kinds = ["plain" if one else "compressed" for one in (_is_plain(array), field.is_plain)]
    for what, found, expected in (
        ("dtype", array.dtype.newbyteorder("="), dtype.newbyteorder("=")),
        ("byte order", order, orders[dtype.str[0]]),
        ("shape", array.shape, shape),
        ("chunk shape", array.chunks, chunk),
        ("chunks", *kinds),
    ):
        if found != expected:
            raise CheckpointError(
                f"{file} is damaged: {field.name} has {what} {found}, expected {expected}; use an earlier checkpoint"
            )


def _is_plain(array: Any) -> bool:
    codecs = [codec["name"] for codec in _codecs(array)]
    encoding = array.metadata.chunk_key_encoding
    return codecs == ["bytes", "crc32c"] and encoding.encode_chunk_key((0, 1)) == "c.0.1"


def _codecs(array: Any) -> Sequence[Any]:
    found: Sequence[Any] = array.metadata.to_dict()["codecs"]
    return found


class PlainChunks:
    """Chunk files of a field, with no codec except the checksum.

    Parameters
    ----------
    folder : str
        Folder of the group.
    name : Path
        Name of the checkpoint in errors.
    node_ranks : int
        Ranks on this node that write or read at the same time.
    """

    def __init__(self, folder: str, name: Path, field: StoredField, node_ranks: int = 1) -> None:
        from google_crc32c import extend

        self._extend = extend
        self._folder, self._name, self._field = folder, name, field
        self._extra = () if field.stored_shapes[0] == field.shape else (0,)
        self._nbytes = prod(field.chunk) * field.dtype.itemsize
        self._aside, self._syncer = Aside(node_ranks), Syncer()

    def write(self, index: tuple[int, ...], parts: Iterable[Array]) -> None:
        """Write a chunk from its parts, in order, and append the checksum."""
        handle = os.open(self._path(index), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            checksum = 0
            for part in parts:
                values = as_bytes(part)
                with self._aside.call(
                    values.nbytes, partial(self._extend, checksum, values)
                ) as found:
                    _write_all(handle, values)
                checksum = found()
            _write_all(handle, np.frombuffer(checksum.to_bytes(CRC_BYTES, "little"), np.uint8))
        except BaseException:
            os.close(handle)
            raise
        self._syncer.take(handle)

    def finish(self) -> None:
        """Wait until all chunks are on the disk; raises OSError."""
        self._syncer.finish()

    def write_whole(self, index: tuple[int, ...], values: Array) -> None:
        """Write a chunk from an array of its shape, or of a smaller shape at the end of the field."""
        if values.shape != self._field.chunk:
            chunk = np.zeros(self._field.chunk, values.dtype)
            chunk[tuple(map(slice, values.shape))] = values
            values = chunk
        self.write(index, [np.ascontiguousarray(values)])

    @contextmanager
    def reading(self, index: tuple[int, ...]) -> Iterator[ChunkReader]:
        """Open a chunk; raises `CheckpointError` if it is missing or truncated, and OSError."""
        path = self._path(index)
        try:
            handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{self._shown(index)} is missing; use an earlier checkpoint"
            ) from error
        try:
            found, expected = os.fstat(handle).st_size, self._nbytes + CRC_BYTES
            if found != expected:
                raise CheckpointError(
                    f"{self._shown(index)} has {found} bytes, expected {expected}: it was cut off, or replaced; use an "
                    "earlier checkpoint"
                )
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # read ahead, twice as far
            yield ChunkReader(handle, self._nbytes, self._aside)
        finally:
            os.close(handle)

    def read_ahead(self, index: tuple[int, ...]) -> None:
        """Let the system read a chunk ahead while another chunk is processed; does not raise."""
        with suppress(OSError):
            handle = os.open(self._path(index), os.O_RDONLY)
            try:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(handle)

    def check(self, index: tuple[int, ...], residue: int) -> None:
        """Raise `CheckpointError` if the residues of a chunk do not add up to 0; see `ChunkReader.residue`."""
        if residue:
            raise CheckpointError(
                f"{self._shown(index)} is damaged: its bytes do not have the checksum that is stored with them; use an "
                "earlier checkpoint"
            )

    def check_shared(self, of_all: Iterable[Mapping[tuple[int, ...], int]]) -> None:
        """Check the chunks that several ranks read in part, by the residues of these ranks."""
        sums: dict[tuple[int, ...], int] = {}
        for residues in of_all:
            for index, residue in residues.items():
                sums[index] = sums.get(index, 0) ^ residue
        for index, residue in sums.items():
            self.check(index, residue)

    def read_whole(self, index: tuple[int, ...], shape: tuple[int, ...]) -> Array:
        """Return the values of a chunk, cut off at the end of the field; raises `CheckpointError` and OSError."""
        values = np.empty(self._field.chunk, self._field.opaque_dtype)
        with self.reading(index) as reader:
            reader.read(values, 0)
            self.check(index, reader.residue())
        return values[tuple(map(slice, shape))]

    def _shown(self, index: tuple[int, ...]) -> Path:
        return self._name / self._field.name / os.path.basename(self._path(index))

    def _path(self, index: tuple[int, ...]) -> str:
        key = ".".join(map(str, ("c", *index, *self._extra)))
        return os.path.join(self._folder, self._field.name, key)


class ChunkReader:
    """An open chunk of ``nbytes`` bytes; its parts are read in the order of the file."""

    def __init__(self, handle: int, nbytes: int, aside: Aside) -> None:
        self._handle, self._nbytes, self._aside = handle, nbytes, aside
        self._checksum = PartialChecksum()
        self._last: tuple[Array, int] | None = None

    def read(self, part: Array, offset: int, *, is_counted: bool = True) -> None:
        """Read bytes, beginning at an offset, into a contiguous array.

        The bytes are added to the checksum in `counting`, or during the next read; until then the array must not
        change.
        """
        with self.counting():
            _read_all(self._handle, as_bytes(part), offset)
        self._last = (part, offset) if is_counted else None

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Add the bytes of the last read to the checksum, during the block."""
        last, self._last = self._last, None
        if last is None:
            yield
        else:
            with self._aside.call(last[0].nbytes, partial(self._checksum.add, *last)):
                yield

    def residue(self, *, has_stored: bool = True) -> int:
        """Return the residue of the counted bytes; one rank also includes the stored checksum (``has_stored``).

        If one rank counts each byte of a chunk, the residues of all ranks add up (by XOR) to 0, unless the chunk is
        damaged. Bytes that no rank counts are treated as zeros.
        """
        with self.counting():
            pass
        found = self._checksum.of(self._nbytes)
        if not has_stored:
            return found
        stored = np.empty(CRC_BYTES, np.uint8)
        _read_all(self._handle, stored, self._nbytes)
        return found ^ linear_part(int.from_bytes(stored.tobytes(), "little"), self._nbytes)


class CodecChunks:
    """Chunks of a field with other codecs, written and read whole by zarr-python."""

    def __init__(self, folder: str, name: Path, field: StoredField, *, mode: str) -> None:
        self._name, self._field = name, field
        # Chunks of zeros must be written, too. `open_array` ignores its own option for this.
        with load_zarr().config.set({"array.write_empty_chunks": True}):
            self._array = _array(Path(folder), name, field.name, mode)
        self._folder, self._syncer = folder, Syncer()

    def write_whole(self, index: tuple[int, ...], values: Array) -> None:
        """Write a chunk from an array of its shape, or of a smaller shape at the end of the field."""
        self._array[self._cut(index, values.shape)] = self._stored(values)
        self._syncer.take(os.open(self._path(index), os.O_RDONLY))

    def finish(self) -> None:
        """Wait until all chunks are on the disk; raises OSError."""
        self._syncer.finish()

    def read_whole(self, index: tuple[int, ...], shape: tuple[int, ...]) -> Array:
        """Return the values of a chunk; raises `CheckpointError` and OSError."""
        chunk = self._name / self._field.name / os.path.basename(self._path(index))
        try:
            values = np.ascontiguousarray(self._array[self._cut(index, shape)])
        except Exception as error:  # each codec raises other types
            raise CheckpointError(
                f"{chunk} is damaged ({type(error).__name__}: {error}); use an earlier checkpoint"
            ) from error
        # Check after the read: a replaced checkpoint is removed file by file, and zarr-python reads a missing file as
        # zeros.
        if not os.path.isfile(self._path(index)):
            raise CheckpointError(f"{chunk} is missing; use an earlier checkpoint")
        if self._array.shape != self._field.shape:
            return values.view(self._field.opaque_dtype)[..., 0]
        return values.astype(self._field.dtype, copy=False)

    def _cut(self, index: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
        return tuple(
            slice(number * chunk, number * chunk + extent)
            for number, chunk, extent in zip(index, self._field.chunk, shape, strict=True)
        )

    def _stored(self, values: Array) -> Array:
        if self._array.shape == self._field.shape:
            return values
        return np.ascontiguousarray(values)[..., None].view(np.uint8)

    def _path(self, index: tuple[int, ...]) -> str:
        extra = () if self._array.shape == self._field.shape else (0,)
        key = self._array.metadata.encode_chunk_key((*index, *extra))
        return os.path.join(self._folder, self._field.name, key)


def _write_all(handle: int, values: Array) -> None:
    view = values.data
    while view:
        view = view[os.write(handle, view) :]


def _read_all(handle: int, values: Array, offset: int) -> None:
    view = values.data
    while view:
        found = os.preadv(handle, [view], offset)
        if not found:
            raise OSError("the file ended early")
        view, offset = view[found:], offset + found
