"""Description of a field in a checkpoint: the Zarr metadata of its array, with halox's attributes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from halox.decomposition import FieldLayout, FieldSpec
from halox.decomposition.boundaries import Boundary
from halox.domain.dimension_names import with_faces
from halox.domain.options import POSITIONS, FieldOptions
from halox.errors import FieldError
from halox.io.checkpoint.chunks import shard_shapes
from halox.io.regions import Cut, region_shape
from halox.runtime.arrays import DType

_NUMBERS = "?bhilqBHILQefdFD"
"""Characters of the dtypes that Zarr supports like NumPy; other dtypes are stored as bytes, along one more axis."""

_FILL_VALUES: dict[str, Any] = {"b": False, "c": [0, 0]}

COMPONENTS, STAGGERED, PARITY, DTYPE = (
    f"halox_{name}" for name in ("components", "staggered", "parity", "dtype")
)
SIGN, POSITION, BOUNDARY, TABLE = _KEPT = tuple(
    f"halox_{name}" for name in ("sign", "position", "boundary", "table")
)


@dataclass(frozen=True)
class StoredField:
    """A field in a checkpoint.

    ``metadata`` has the Zarr metadata of its array, without attributes.
    """

    name: str
    shape: tuple[int, ...]  # of the whole field, component axes included
    shard: tuple[int, ...]  # of one file or object
    dtype: DType
    before: int  # component axes before the grid axes
    after: int
    staggered: tuple[int, ...]  # grid axes along which the field is staggered
    parity: str  # "even", "odd", or empty for all cells
    metadata: dict[str, Any]
    kept: Mapping[str, str]  # attributes of `kept_attributes`

    @classmethod
    def of(
        cls,
        name: str,
        layout: FieldLayout,
        dtype: DType,
        codecs: Sequence[Any] = (),
        region: Cut = (),
        kept: Mapping[str, str] | None = None,
    ) -> StoredField:
        """Describe a field of a grid, or a region of it, for writing, with compression by ``codecs``."""
        spec, shape = layout.spec, region_shape(layout, region)
        shard, chunk = shard_shapes(layout, dtype.itemsize, region)
        last = () if is_number(dtype) else (dtype.itemsize,)
        checked = [{"name": "crc32c"}]
        sharding = {
            "chunk_shape": [*chunk, *last],
            "codecs": [bytes_codec(dtype), *codecs, *checked],
            "index_codecs": [bytes_codec(np.dtype("<u8")), *checked],
            "index_location": "end",
        }
        return cls(
            name,
            shape,
            shard,
            dtype,
            len(spec.components_before),
            len(spec.components_after),
            tuple(axis for axis, is_staggered in enumerate(spec.staggered) if is_staggered),
            spec.parity or "",
            array_metadata(
                (*shape, *last),
                (*shard, *last),
                dtype,
                [{"name": "sharding_indexed", "configuration": sharding}],
            ),
            kept or {},
        )

    @classmethod
    def read(cls, name: str, metadata: Mapping[str, Any]) -> StoredField:
        """Describe a field from its array's metadata; raises KeyError, TypeError or ValueError if they are invalid."""
        attributes = metadata["attributes"]
        before, after = map(int, attributes[COMPONENTS])
        dtype = dtype_from(attributes[DTYPE])
        if metadata["data_type"] != data_type(dtype):
            raise ValueError(
                f"{name} has dtype {metadata['data_type']}, expected {data_type(dtype)}"
            )
        shape, shard = metadata["shape"], metadata["chunk_grid"]["configuration"]["chunk_shape"]
        if not is_number(dtype):
            shape, shard = shape[:-1], shard[:-1]
        staggered, parity = tuple(map(int, attributes[STAGGERED])), str(attributes[PARITY])
        bare = {key: value for key, value in metadata.items() if key != "attributes"}
        kept = {key: str(attributes[key]) for key in _KEPT if key in attributes}
        return cls(
            name, tuple(shape), tuple(shard), dtype, before, after, staggered, parity, bare, kept
        )

    @property
    def table(self) -> str:
        """Name of the table of its array; empty for a field of the grid."""
        return json.loads(self.kept.get(TABLE, '""'))  # type: ignore[no-any-return]

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of its array; netCDF supports all of them except structured dtypes."""
        return {
            COMPONENTS: [self.before, self.after],
            STAGGERED: list(self.staggered),
            PARITY: self.parity,
            DTYPE: dtype_text(self.dtype),
            **self.kept,
        }

    @property
    def options(self) -> FieldOptions:
        """Options of `Grid.zeros` for a field with the same layout; raises `FieldError` if one was a function."""
        options: FieldOptions = {
            **kept_options(self.kept),
            "components": (
                *self.shape[: self.before],
                ...,
                *self.shape[len(self.shape) - self.after :],
            ),
            "staggered": self.staggered,
        }
        if self.parity:
            options["parity"] = self.parity  # type: ignore[typeddict-item]
        return options

    def dims(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Return the names of its array's dimensions, for grid axes with the names ``axes``.

        Faces, and cells of one parity, are at other positions than cells, so their dimensions have separate names.
        Component dimensions have names per field, since fields may have different components.
        """
        axes = (f"{self.table}_row",) if self.table else axes
        names = with_faces(axes, (n in self.staggered for n in range(len(axes))))
        if self.parity:
            names[-1] = f"{axes[-1]}_{self.parity}"
        components = [f"{self.name}_component_{n}" for n in range(self.before + self.after)]
        last = () if is_number(self.dtype) else (f"{self.name}_byte",)
        return (*components[: self.before], *names, *components[self.before :], *last)

    def differs(self, layout: FieldLayout, dtype: DType) -> str:
        """Return why it cannot be loaded into a field of a grid; empty if it can."""
        other = StoredField.of(self.name, layout, dtype)
        for what, mine, theirs in (
            ("dtype", self.dtype, other.dtype),
            ("staggered axes", self.staggered, other.staggered),
            ("parity", self.parity or "all cells", other.parity or "all cells"),
            ("component axes", (self.before, self.after), (other.before, other.after)),
            ("shape", self.shape, other.shape),
        ):
            if mine != theirs:
                return f"{what} {mine} in the checkpoint, {theirs} in the field"
        return ""


def kept_attributes(spec: FieldSpec, plain: FieldSpec) -> dict[str, str]:
    """Return the options of a field that a plain field of its grid lacks, as attributes with values in JSON.

    Only the name of a function that fills a boundary is kept.
    """
    options: dict[str, Any] = {}
    if spec.is_vector or spec.signs:
        options[SIGN] = "vector" if spec.is_vector else spec.signs
    if spec.positions:
        options[POSITION] = [POSITIONS[place] for place in spec.positions]
    if spec.boundary != plain.boundary:
        options[BOUNDARY] = [
            (component, [[_side_data(side) for side in pair] for pair in sides])
            for component, sides in spec.boundary
        ]
    return {name: json.dumps(option) for name, option in options.items()}


def kept_options(attributes: Mapping[Any, Any]) -> FieldOptions:
    """Return the options of `Grid.zeros` that attributes keep; raises `FieldError` if one was a function."""
    options: FieldOptions = {}
    given = {name: json.loads(attributes[name]) for name in _KEPT if name in attributes}
    if SIGN in given:
        sign = given[SIGN]
        options["sign"] = sign if sign == "vector" else {tuple(key): one for key, one in sign}
    if POSITION in given:
        options["position"] = given[POSITION]
    if BOUNDARY in given:
        options["boundary"] = {
            tuple(component): [[_side_from(side) for side in pair] for pair in sides]
            for component, sides in given[BOUNDARY]
        }
    return options


def _side_data(side: Boundary | None) -> Any:
    if side is None:
        return None
    if side.function is not None:
        return {"function": str(side)}
    if side.number is None:
        return side.kind
    number = side.number
    return [side.kind, [number.real, number.imag] if isinstance(number, complex) else number]


def _side_from(side: Any) -> Any:
    if isinstance(side, dict):
        raise FieldError(
            f"its boundary was the function {side['function']}, which cannot be stored; give it again, or "
            f"remove the attribute {BOUNDARY} of a labelled array"
        )
    if isinstance(side, list):
        kind, number = side
        return kind, complex(*number) if isinstance(number, list) else number
    return side


def is_number(dtype: DType) -> bool:
    """Whether Zarr supports a dtype like NumPy."""
    return dtype.char in _NUMBERS


def data_type(dtype: DType) -> str:
    """Return the Zarr data type of the elements of a dtype, in the order of the machine."""
    return dtype.name if is_number(dtype) else "uint8"


def bytes_codec(dtype: DType) -> dict[str, Any]:
    """Return the Zarr codec that stores elements in the byte order of a dtype."""
    endian = "big" if is_number(dtype) and dtype.str[0] == ">" else "little"
    return {"name": "bytes", "configuration": {"endian": endian}}


def array_metadata(
    shape: Sequence[int], chunk: Sequence[int], dtype: DType, codecs: Sequence[Any]
) -> dict[str, Any]:
    """Return the metadata of a Zarr array, without attributes and names of dimensions."""
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": data_type(dtype),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": _FILL_VALUES.get(dtype.kind, 0),
        "codecs": list(codecs),
    }


def dtype_text(dtype: DType) -> Any:
    """Return a dtype as a JSON value, including offsets and padding of structured dtypes.

    Examples
    --------
    >>> dtype_text(np.dtype(">f8")), dtype_from(dtype_text(np.dtype([("a", "f4", 3)]))).itemsize
    ('>f8', 12)
    """
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return {"base": dtype_text(base), "shape": list(shape)}
    if dtype.names is None or dtype.fields is None:
        return dtype.str
    fields = [dtype.fields[name] for name in dtype.names]
    return {
        "names": list(dtype.names),
        "formats": [dtype_text(field[0]) for field in fields],
        "offsets": [int(field[1]) for field in fields],
        "itemsize": dtype.itemsize,
    }


def dtype_from(text: Any) -> DType:
    """Return the dtype of a `dtype_text`; raises KeyError, TypeError or ValueError if it is invalid."""
    if isinstance(text, str):
        dtype = np.dtype(text)
        if dtype.hasobject:
            raise ValueError(f"dtype {text} has no fixed size")
        return dtype
    if "base" in text:
        return np.dtype((dtype_from(text["base"]), tuple(text["shape"])))
    formats: Any = [dtype_from(member) for member in text["formats"]]
    names, offsets = text["names"], text["offsets"]
    return np.dtype(
        {"names": names, "formats": formats, "offsets": offsets, "itemsize": text["itemsize"]}
    )
