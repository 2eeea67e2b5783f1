"""Description of a field in a checkpoint, stored in the attributes of its array."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from halox.checkpoint.chunks import chunk_shape
from halox.decomposition import FieldLayout, FieldSpec
from halox.dimension_names import with_faces
from halox.runtime.arrays import DType

_NUMBERS = "?bhilqBHILQefdFD"
"""Characters of the dtypes that Zarr supports like NumPy; other dtypes are stored as bytes, along one more axis."""

COMPONENTS, STAGGERED, PARITY, DTYPE = (
    f"halox_{name}" for name in ("components", "staggered", "parity", "dtype")
)


@dataclass(frozen=True)
class StoredField:
    """A field in a checkpoint."""

    name: str
    shape: tuple[int, ...]  # of the whole field, component axes included
    chunk: tuple[int, ...]
    dtype: DType
    before: int  # component axes before the grid axes
    after: int
    staggered: tuple[int, ...]  # grid axes along which the field is staggered
    parity: str  # "even", "odd", or empty for all cells
    is_plain: bool  # whether chunks are only bytes and a checksum, with no other codec

    @classmethod
    def of(cls, name: str, layout: FieldLayout, dtype: DType, *, is_plain: bool) -> StoredField:
        """Describe a field of a grid for writing."""
        spec = layout.spec
        return cls(
            name,
            layout.global_shape,
            chunk_shape(layout, dtype.itemsize),
            dtype,
            len(spec.components_before),
            len(spec.components_after),
            tuple(axis for axis, is_staggered in enumerate(spec.staggered) if is_staggered),
            spec.parity or "",
            is_plain,
        )

    @classmethod
    def read(
        cls,
        name: str,
        shape: Sequence[int],
        chunk: Sequence[int],
        attributes: Mapping[str, Any],
        *,
        is_plain: bool,
    ) -> StoredField:
        """Describe a field from its array's metadata; raises KeyError, TypeError or ValueError if they are invalid."""
        before, after = map(int, attributes[COMPONENTS])
        dtype = dtype_from(attributes[DTYPE])
        if not is_number(dtype):
            shape, chunk = shape[:-1], chunk[:-1]
        staggered = tuple(map(int, attributes[STAGGERED]))
        parity = str(attributes[PARITY])
        return cls(
            name, tuple(shape), tuple(chunk), dtype, before, after, staggered, parity, is_plain
        )

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of its array; netCDF supports all of them except structured dtypes."""
        return {
            COMPONENTS: [self.before, self.after],
            STAGGERED: list(self.staggered),
            PARITY: self.parity,
            DTYPE: dtype_text(self.dtype),
        }

    @property
    def opaque_dtype(self) -> DType:
        """The dtype for copies of its cells: bytes for structured dtypes, since NumPy does not copy their padding."""
        return self.dtype if self.dtype.names is None else np.dtype(f"V{self.dtype.itemsize}")

    @property
    def stored_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], DType]:
        """Shape, chunk shape and dtype of its array in the store."""
        if is_number(self.dtype):
            # By its text: of equal C types, such as long and long long, zarr supports only one.
            return self.shape, self.chunk, np.dtype(self.dtype.str)
        size = self.dtype.itemsize
        return (*self.shape, size), (*self.chunk, size), np.dtype(np.uint8)

    @property
    def options(self) -> dict[str, Any]:
        """Options of `Grid.zeros` for a field with the same layout."""
        options: dict[str, Any] = {
            "components": self.shape[: self.before],
            "components_after": self.shape[len(self.shape) - self.after :],
            "staggered": self.staggered,
        }
        return options | ({"parity": self.parity} if self.parity else {})

    def dims(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Return the names of its array's dimensions, for grid axes with the names ``axes``.

        Faces, and cells of one parity, are at other positions than cells, so their dimensions have separate names.
        Component dimensions have names per field, since fields may have different components.
        """
        names = with_faces(axes, (n in self.staggered for n in range(len(axes))))
        if self.parity:
            names[-1] = f"{axes[-1]}_{self.parity}"
        components = [f"{self.name}_component_{n}" for n in range(self.before + self.after)]
        last = () if is_number(self.dtype) else (f"{self.name}_byte",)
        return (*components[: self.before], *names, *components[self.before :], *last)

    def differs(self, layout: FieldLayout, dtype: DType) -> str:
        """Return why it cannot be loaded into a field of a grid; empty if it can."""
        other = StoredField.of(self.name, layout, dtype, is_plain=True)
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


def is_number(dtype: DType) -> bool:
    """Whether Zarr supports a dtype like NumPy."""
    return dtype.char in _NUMBERS


def spec_text(spec: FieldSpec) -> str:
    """Return the text of a layout's properties that affect a checkpoint, to compare between ranks."""
    return str((spec.components_before, spec.components_after, spec.staggered, spec.parity))


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
        found = np.dtype(text)
        if found.hasobject:
            raise ValueError(f"dtype {text} is none of fixed size")
        return found
    if "base" in text:
        return np.dtype((dtype_from(text["base"]), tuple(text["shape"])))
    formats: Any = [dtype_from(one) for one in text["formats"]]
    names, offsets = text["names"], text["offsets"]
    return np.dtype(
        {"names": names, "formats": formats, "offsets": offsets, "itemsize": text["itemsize"]}
    )
