"""The Zarr v3 group of a checkpoint: metadata, and arrays that TensorStore reads and writes.

TensorStore compresses, checks and writes chunks in its own threads, to files or to S3. A missing chunk is an
error here, not a chunk of fill values.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as member
from functools import cached_property
from typing import Any
from uuid import uuid4

import numpy as np

from halox.errors import CheckpointError, MissingPackageError
from halox.io.checkpoint.fields import StoredField, array_metadata, bytes_codec
from halox.io.checkpoint.folder import METADATA
from halox.runtime.arrays import Array
from halox.values import as_list, shown

FORMAT = 2
"""Version of halox's format, in addition to Zarr's version."""

PREFIX = "halox_"
"""Prefix of the names of halox's attributes."""

FORMAT_KEY, GRID_SHAPE, _ID = f"{PREFIX}format", f"{PREFIX}grid_shape", f"{PREFIX}id"
_PROC_SHAPE, _BLOCKS = f"{PREFIX}proc_shape", f"{PREFIX}blocks"

OUTPUT = f"{PREFIX}output"
"""Attribute of the outputs of `halox.Output`."""

_CONTEXT = {
    # A shard has one writer, so that locks of files are not needed; some file systems have none.
    "file_io_locking": {"mode": "none"},
    "s3_request_retries": {"max_retries": 6, "initial_delay": "0.5s", "max_delay": "8s"},
}


@dataclass(frozen=True)
class Contents:
    """Description of a checkpoint, from its metadata.

    ``blocks`` has the cells of each block along each grid axis, for `halox view`; only a save sets it.
    """

    grid_shape: tuple[int, ...]
    fields: dict[str, StoredField]
    attrs: dict[str, Any]
    blocks: tuple[tuple[int, ...], ...] = ()


def load_tensorstore() -> Any:
    """Return the module of TensorStore; raises `MissingPackageError`."""
    try:
        import tensorstore
    except ImportError as error:
        raise MissingPackageError(
            f"checkpoints need tensorstore 0.1.71 or newer ({error}); install it with `pip install tensorstore`, or "
            "save one field as .npy"
        ) from error
    return tensorstore


def codecs_of(compressors: object) -> list[Any]:
    """Return the JSON of the Zarr codecs of the option ``compressors``; raises `CheckpointError`."""
    if compressors is None:
        return []
    codecs: list[Any] = []
    one_or_more = [compressors] if isinstance(compressors, str) else as_list(compressors)
    for compressor in [compressors] if one_or_more is None else one_or_more:
        codec = {"name": compressor} if isinstance(compressor, str) else compressor
        to_dict = getattr(codec, "to_dict", None)  # codecs of zarr.codecs
        try:
            codec = to_dict() if callable(to_dict) else codec
            chain = [bytes_codec(np.dtype("<f8")), codec]
            load_tensorstore().CodecSpec({"driver": "zarr3", "codecs": chain})
        except MissingPackageError:
            raise
        except Exception as error:
            raise CheckpointError(
                "compressors: expected Zarr codecs from bytes to bytes: names, such as 'zstd', dicts, such as "
                "{'name': 'zstd', 'configuration': {'level': 3}}, or codecs of zarr.codecs, got "
                f"{shown(compressor)}"
            ) from error
        codecs.append(codec)
    return codecs


class StoreError(OSError):
    """An error of TensorStore; the text begins with the kind of error, such as NOT_FOUND."""


def _new_context() -> Any:
    return load_tensorstore().Context(_CONTEXT)


@dataclass(frozen=True)
class Store:
    """A folder or prefix of keys, accessed by TensorStore.

    ``driver`` is TensorStore's specification of the store, without the path. ``path`` ends with a slash; errors show
    ``name`` instead. ``limit_s`` limits each wait; 0 for no limit. ``context`` has TensorStore's threads, caches and
    connections.
    """

    driver: dict[str, Any]
    path: str
    name: str
    limit_s: float
    context: Any = member(default_factory=_new_context, repr=False)

    @classmethod
    def of_folder(cls, folder: str | os.PathLike[str], name: object, limit_s: float) -> Store:
        return cls({"driver": "file"}, f"{folder}/", str(name), limit_s)

    def below(self, name: str, *, shown_as: str | None = None) -> Store:
        return replace(self, path=f"{self.path}{name}/", name=shown_as or f"{self.name}/{name}")

    def wait(self, future: Any) -> Any:
        """Return the result of a future of TensorStore; raises `StoreError`."""
        try:
            return future.result(timeout=self.limit_s or None)
        except TimeoutError as error:
            raise StoreError(
                f"TIMEOUT: {self.name} did not answer within {self.limit_s:g} s (HALOX_TIMEOUT)"
            ) from error
        except Exception as error:  # mostly ValueError
            text = re.split(r" \[[\w -]+='", str(error))[0]  # without a specification or response
            raise StoreError(text.replace(self.path, f"{self.name}/")) from error

    def read_json(self, key: str = METADATA) -> Any:
        """Return a JSON value, None if the key is missing; raises ValueError if it is no JSON, and `StoreError`."""
        result = self.wait(self._keys.read(key))
        return None if result.state == "missing" else json.loads(result.value)

    def write_json(self, value: object, key: str = METADATA) -> None:
        """Replace a JSON value atomically, through to the disk."""
        self.wait(self._keys.write(key, json.dumps(value).encode()))

    def remove(self) -> None:
        self.wait(self._keys.delete_range(load_tensorstore().KvStore.KeyRange()))

    def array(self, metadata: Mapping[str, Any], *, mode: str) -> Any:
        """Return an array of TensorStore; raises `StoreError`.

        ``mode`` is "create", "write" or "read". For "write" the stored metadata is not read; for "read" it must be the
        same as ``metadata``.
        """
        spec = {
            "driver": "zarr3",
            "kvstore": {**self.driver, "path": self.path},
            "metadata": metadata,
            "store_data_equal_to_fill_value": True,
            "fill_missing_data_reads": False,
        }
        options = {
            "create": {"create": True},
            "write": {"open": True, "assume_metadata": True},
            "read": {"open": True},
        }
        opening = load_tensorstore().open(spec, context=self.context, **options[mode])
        return self.wait(opening)

    @cached_property
    def _keys(self) -> Any:
        spec = {**self.driver, "path": self.path}
        return self.wait(load_tensorstore().KvStore.open(spec, context=self.context))


def create(
    store: Store,
    contents: Contents,
    dims: Sequence[str],
    coords: Mapping[str, Array],
    attrs: Mapping[str, Mapping[str, Any]],
) -> None:
    """Create a group and write its coordinates, but no cells; ``attrs`` has the user's attributes of its arrays."""
    arrays = {
        name: {
            **field.metadata,
            "attributes": {**attrs.get(name, {}), **field.attributes},
            "dimension_names": field.dims(dims),
        }
        for name, field in contents.fields.items()
    }
    arrays |= {name: coordinate(name, values, attrs) for name, values in coords.items()}
    own = {
        FORMAT_KEY: FORMAT,
        _ID: uuid4().hex,
        GRID_SHAPE: list(contents.grid_shape),
        # netCDF has no nested lists: store the blocks of all axes in one list, axis after axis.
        _PROC_SHAPE: [len(sizes) for sizes in contents.blocks],
        _BLOCKS: [size for sizes in contents.blocks for size in sizes],
    }
    make(store, group({**contents.attrs, **own}, arrays), coords)


def coordinate(name: str, values: Array, attrs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the metadata of the array of a dimension's coordinates."""
    codecs = [bytes_codec(values.dtype), {"name": "crc32c"}]
    return {
        **array_metadata(values.shape, values.shape, values.dtype, codecs),
        "attributes": dict(attrs.get(name, {})),
        "dimension_names": [name],
    }


def make(
    store: Store, metadata: Mapping[str, Any], values: Mapping[str, Array]
) -> Mapping[str, Any]:
    """Write a group with its arrays, and the values of some of them; return the group's metadata."""
    store.write_json(metadata)
    # After the group: TensorStore never ends the creation of an array in a missing bucket.
    arrays = {}
    for name, array_json in arrays_of(metadata).items():
        # TensorStore has no NaN in attributes: here, though not in the group, they are text, as Zarr's fill values are.
        strict = json.loads(json.dumps(array_json), parse_constant=str)
        array = store.below(name).array(strict, mode="create")
        if name in values:
            store.wait(array.write(as_native(values[name])))
        # zarr-python needs the configurations of compressors that were given by name; TensorStore has filled them in.
        codecs = array.spec().to_json()["metadata"]["codecs"]
        arrays[name] = {**array_json, "codecs": codecs}
    complete = group(metadata["attributes"], arrays)
    if complete != metadata:
        store.write_json(complete)
    return complete


def group(attributes: Mapping[str, Any], arrays: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the metadata of a Zarr group, with the consolidated metadata of its arrays."""
    metadata = {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}
    if arrays is not None:
        # Not in Zarr's specification yet; zarr-python and xarray read it.
        consolidated = {"kind": "inline", "must_understand": False, "metadata": dict(arrays)}
        metadata["consolidated_metadata"] = consolidated
    return metadata


def arrays_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of the arrays of a group; raises KeyError or TypeError."""
    arrays: dict[str, Any] = metadata["consolidated_metadata"]["metadata"]
    return arrays


def as_native(values: Array) -> Array:
    """Return values in the byte order of the machine, with the same bits."""
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def is_checkpoint(metadata: object) -> bool:
    """Whether the metadata of a group describe a checkpoint."""
    return isinstance(metadata, dict) and FORMAT_KEY in metadata.get("attributes", ())


def is_output(metadata: object) -> bool:
    """Whether the metadata of a group describe an output of `halox.Output`."""
    return isinstance(metadata, dict) and OUTPUT in metadata.get("attributes", ())


def id_of(store: Store) -> str:
    """Return the id of a checkpoint in a file system, which each save makes anew; empty if its metadata is damaged."""
    try:
        metadata = store.read_json()
    except ValueError:
        return ""
    attributes = metadata.get("attributes", {}) if isinstance(metadata, dict) else {}
    return str(attributes.get(_ID, ""))


def read(store: Store) -> Contents:
    """Return the description of a checkpoint; raises `CheckpointError`."""
    name, why = store.name, f"it has no {METADATA} of a group"
    try:
        metadata = store.read_json()
    except ValueError as error:
        metadata, why = None, f"{type(error).__name__}: {error}"
    if not isinstance(metadata, dict) or metadata.get("node_type") != "group":
        raise CheckpointError(
            f"{name} is no Zarr group, or its metadata is damaged ({why}); give the path of a checkpoint that "
            "grid.save has written"
        )
    attributes = metadata.get("attributes", {})
    if is_output(metadata):
        raise CheckpointError(
            f"{name} is an output of halox.Output; open it with xarray.open_zarr, and load a checkpoint of grid.save"
        )
    check_version(attributes.get(FORMAT_KEY), name)
    try:
        arrays = arrays_of(metadata)
        fields = {
            key: StoredField.read(key, array)
            for key, array in sorted(arrays.items())
            if any(attribute.startswith(PREFIX) for attribute in array.get("attributes", {}))
        }
        grid_shape = tuple(map(int, attributes[GRID_SHAPE]))
    except Exception as error:
        raise CheckpointError(
            f"{name}/{METADATA} is damaged ({type(error).__name__}: {error}); use an earlier checkpoint"
        ) from error
    user = {key: value for key, value in attributes.items() if not key.startswith(PREFIX)}
    return Contents(grid_shape, fields, user)


def check_version(version: object, name: str) -> None:
    """Raise `CheckpointError` if this version of halox does not read a format."""
    if version != FORMAT:
        raise CheckpointError(
            f"{name}: expected {FORMAT_KEY} of {FORMAT} among the group's attributes, found {version!r}; give a group "
            "that grid.save of this version of halox has written"
        )


def open_field(store: Store, field: StoredField) -> Any:
    """Return the array of a field for reading; raises `CheckpointError` if its metadata differ from the group's."""
    try:
        return store.below(field.name).array(field.metadata, mode="read")
    except StoreError as error:
        raise damaged(store, field, error) from error


def damaged(store: Store, field: StoredField, error: StoreError) -> CheckpointError:
    """Return the error of an array that cannot be read."""
    text = str(error)
    remedy = "; use an earlier checkpoint" if text.startswith(_DAMAGED) else ""
    return CheckpointError(f"{store.name}/{field.name} cannot be read: {text}{remedy}")


_DAMAGED = ("NOT_FOUND", "DATA_LOSS", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "OUT_OF_RANGE")
