"""Layouts of a grid's fields: `FieldLayouts.find` answers for all calls which layout an array has.

An array is, in this order, a field that the grid allocated or the user declared; a field with the grid's halo, by its
shape; a field of the only declared layout with this shape, such as a result of arithmetic on declared fields; or, for
calls that need no halo, the cells that the rank owns. A shape with several readings is an error; calls that need the
halo take the reading that has it. Points of staggered fields and cells of one parity are never inferred: their shapes
are those of cells.

A field is identified by its memory: address, shape, strides and dtype. A declared layout applies to every array with
the same address, shape, strides and dtype, as long as the array that owns the memory lives. It makes no difference
which views are alive, or on which ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from halox.decomposition import (
    PARITIES,
    Boundaries,
    Decomposition,
    FieldLayout,
    FieldSpec,
    check_widths,
    component_axes,
)
from halox.decomposition.normalise import Halo
from halox.domain.options import FieldOptions, field_spec
from halox.errors import DeviceError, FieldError
from halox.runtime.arrays import Described, DType, describe, owner
from halox.runtime.known_arrays import KnownArrays
from halox.values import shown


class FieldLayouts:
    """Layouts of one rank's fields, by array and by field.

    ``halo`` and ``boundary`` are those of undeclared fields; ``device`` is the GPU of the fields, None for the host.

    Local. The layouts are the same on all ranks only if all ranks make the same declarations; plans and reductions
    compare them.
    """

    def __init__(
        self,
        decomposition: Decomposition,
        rank: int,
        halo: Halo,
        device: int | None,
        boundary: Boundaries = (),
    ) -> None:
        self._decomposition, self._rank, self._halo = decomposition, rank, halo
        self._boundary = boundary
        self._device = device
        # Layouts that are in use: a boundary function made anew for each field must not live for ever.
        self._by_spec: weakref.WeakValueDictionary[FieldSpec, FieldLayout] = (
            weakref.WeakValueDictionary()
        )
        # Layouts of undeclared arrays, and whether such an array lacks the halo of fields: for calls without and with
        # a need of it.
        self._by_shape: tuple[dict[tuple[int, ...], tuple[FieldLayout, bool]], ...] = {}, {}
        # Of earlier calls of `find`, which users make in each step.
        self._known: KnownArrays[FieldLayout] = KnownArrays()
        # By `_field_key`: the owner of the memory, the layout, and the number in the grid's memory.
        self._declared: dict[_FieldKey, tuple[weakref.ref[object], FieldLayout, int]] = {}
        # Arrays that own the memory of fields that the grid allocated, by identity.
        self._owners: dict[int, tuple[weakref.ref[object]]] = {}
        # Layouts of fields that were declared so far, the same on all ranks. Of those that differ in boundaries only,
        # the first two are enough to tell that their shape is ambiguous.
        self._declared_layouts: dict[Hashable, list[FieldLayout]] = {}
        # Shapes of the owned points of staggered fields.
        self._shapes_of_points: set[tuple[int, ...]] = set()
        self._tables: weakref.WeakSet[KnownArrays[Any]] = weakref.WeakSet()

    def of(self, spec: FieldSpec) -> FieldLayout:
        """Return the layout of a spec: the same object for equal specs."""
        layout = self._by_spec.get(spec)
        if layout is None:
            layout = self._by_spec[spec] = FieldLayout(self._decomposition, self._rank, spec)
        return layout

    def of_options(self, options: FieldOptions) -> FieldLayout:
        """Return the layout that a field's options describe; raises the errors of `halox.Grid.zeros`."""
        plain = FieldSpec(self._halo, boundary=self._boundary)
        layout = self.of(field_spec(options, plain, self._decomposition))
        check_widths(layout)
        return layout

    def register(self, table: KnownArrays[Any]) -> None:
        """Clear a table of known arrays whenever a declaration changes; does not keep the table alive."""
        self._tables.add(table)

    def record(self, array: object, layout: FieldLayout, number: int | None = None) -> None:
        """Record the layout of a field that the library allocated.

        ``number`` is the field's number among the fields in the grid's memory; None for other memory.
        """
        if number is not None:
            root = owner(array)
            _keep_with(self._owners, id(root), root)
        self._declare(describe(array), array, layout, number or 0)

    def declare(self, array: object, layout: FieldLayout) -> None:
        """Record the layout of a field, and replace an earlier one; raises the errors of `Grid.declare`."""
        described = describe(array)
        self._check_device(described)
        if described.shape != layout.padded_shape:
            raise FieldError(
                f"array: shape {tuple(described.shape)} is not the {shown(layout.padded_shape)} that this layout has "
                f"on rank {self._rank}; allocate with grid.zeros to get it right"
            )
        before = self._declared.get(_field_key(described))
        parities = (before and before[1].spec.parity, layout.spec.parity)
        if None not in parities and parities[0] != parities[1]:
            raise FieldError(
                f"array is a field of {parities[0]} cells, and cannot be declared one of {parities[1]} cells; "
                f"allocate another with parity={parities[1]!r}"
            )
        self._declare(described, array, layout, 0 if before is None else before[2])
        if before is None or before[1] is not layout:
            self._forget_results()  # other arrays may be the same field

    def find(self, array: object, *, halo: bool = False) -> FieldLayout:
        """Return the layout of an array; ``halo`` says whether the caller needs the halo of a field.

        Raises `FieldError` if the shape does not fit the grid or is ambiguous, or the halo is needed and missing, and
        `DeviceError` if the array is on another device than the grid's fields.
        """
        layout = None if halo else self._known.find(None, (array,))
        if layout is None:
            layout = self.read(array, halo=halo)[1]
            if not halo:
                # Arrays of other libraries may not support weak references.
                with suppress(TypeError):
                    self._known.keep(None, (array,), layout)
        return layout

    def find_cells(self, array: object) -> FieldLayout:
        """Return an array's layout without its boundary, for calls that use no halo; raises the errors of `find`."""
        return self.of(self.find(array).spec.without_boundary)

    def number(self, described: Described) -> int:
        """Return an array's number among the grid's fields, the same on all ranks; 0 if it is not such a field."""
        entry = self._declared.get(_field_key(described))
        return 0 if entry is None else entry[2]

    def read(self, array: object, *, halo: bool = False) -> tuple[Described, FieldLayout]:
        """Return an array's description and layout, as `find`."""
        described = describe(array, "field")
        if described.device != self._device:
            self._check_device(described)
        return described, self._layout(described, halo=halo)

    def is_own(self, array: object) -> bool:
        """Whether an array uses the memory of a field that the grid allocated."""
        root = owner(array)
        entry = self._owners.get(id(root))
        return entry is not None and entry[0]() is root

    def is_field(self, array: object, described: Described) -> bool:
        """Whether an array is a field that the grid allocated or the user declared; ``described`` describes it."""
        return _field_key(described) in self._declared or self.is_own(array)

    def declared(self, array: object) -> FieldLayout | None:
        """Return the layout of an allocated or declared field; None for any other object."""
        try:
            entry = self._declared.get(_field_key(describe(array)))
        except FieldError:  # not an array of NumPy or CuPy
            return None
        return None if entry is None else entry[1]

    def of_shape(self, shape: tuple[int, ...]) -> list[FieldLayout]:
        """Return the declared layouts whose arrays have this shape on this rank."""
        return [
            layout
            for alike in self._declared_layouts.values()
            for layout in alike
            if layout.padded_shape == shape
        ]

    def key(
        self, arrays: Sequence[object], *, may_share: bool = True
    ) -> tuple[Hashable, list[Described] | None]:
        """Return the cache key of a plan of some arrays; raises the errors of `find`.

        If the plan may also serve other arrays of these layouts, the key has no addresses, and the arrays' descriptions
        are the second result. It excludes even the alignment of addresses, which may differ between ranks, but all
        ranks must find the same plan. Other arrays need a separate plan, and the key has their memory: fields of the
        grid, read-only arrays, and arrays with strides that only some ranks can distinguish.
        """
        forms, descriptions = [], []
        for array in arrays:
            described = describe(array)
            if described.device != self._device:
                self._check_device(described)
            layout, steps = self._layout(described, halo=True), described.strides
            if not described.writable or layout.is_flat_somewhere or self.is_own(array):
                may_share = False
            if 1 in described.shape:  # the stride along an axis of length 1 is never used
                steps = tuple([s for s, n in zip(steps, described.shape, strict=True) if n > 1])
            forms.append((layout, described.dtype, steps))
            descriptions.append(described)
        if may_share:
            return tuple(forms), descriptions
        roots = [id(owner(array)) for array in arrays]
        memory = [(one.pointer, one.shape, one.strides, one.writable) for one in descriptions]
        return (*forms, *roots, *memory), None

    def _check_device(self, described: Described) -> None:
        """Raise `DeviceError` for an array on another device than the grid's fields."""
        if (described.device is None) != (self._device is None):
            where = "the host" if described.device is None else f"GPU {described.device}"
            kind = "cpu" if self._device is None else "gpu"
            raise DeviceError(
                f"field is on {where}, the grid's fields on {kind}; allocate with grid.zeros, or make the "
                'grid with another device="cpu"|"gpu"'
            )
        if described.device is not None and described.device != self._device:
            raise DeviceError(
                f"field is on GPU {described.device}, rank {self._rank} works on GPU {self._device}; allocate "
                f"with grid.zeros, or under `with cupy.cuda.Device({self._device}):`"
            )

    def _layout(self, described: Described, *, halo: bool) -> FieldLayout:
        """Return the declared layout of an array, or else the layout inferred from its shape."""
        declared = self._declared.get(_field_key(described)) if self._declared else None
        if declared is not None:
            return declared[1]
        known = self._by_shape[halo]
        inferred = known.get(described.shape)
        if inferred is None:
            inferred = known[described.shape] = self._inferred(tuple(described.shape), halo)
        layout, lacks_halo = inferred
        if self._shapes_of_points and not lacks_halo and self._is_inside_staggered(described):
            raise FieldError(
                f"array: on rank {self._rank} the points of a staggered field have the shape {layout.padded_shape} of "
                "a field of cells with its halo; give the field itself, not grid.interior(field)"
            )
        if halo and lacks_halo:
            raise FieldError(
                f"array: shape {layout.padded_shape} has the cells of rank {self._rank} without their halo, which this "
                "call needs; give the field itself, no slice of it and not grid.interior(field), or tell with "
                "grid.declare(array, halo=0) if it has no halo"
            )
        return layout

    def _is_inside_staggered(self, described: Described) -> bool:
        """Whether an array is a view of the owned points of a declared staggered field."""
        if described.shape not in self._shapes_of_points:
            return False
        for (pointer, shape, strides, dtype), (_, layout, _) in self._declared.items():
            if any(layout.spec.staggered) and strides == described.strides:
                cuts = [range(n)[cut] for n, cut in zip(shape, layout.interior, strict=True)]
                pointer += sum(cut.start * step for cut, step in zip(cuts, strides, strict=True))
                if (pointer, tuple(map(len, cuts)), strides, dtype) == _field_key(described):
                    return True
        return False

    def _inferred(self, shape: tuple[int, ...], halo: bool) -> tuple[FieldLayout, bool]:
        """Infer a layout from a shape, and whether the array lacks a halo; raises `FieldError`."""
        none = tuple((0, 0) for _ in self._halo)
        plain = self.of(FieldSpec(self._halo)).padded_shape
        specs = [FieldSpec(self._halo, *axes) for axes in component_axes(shape, plain)]
        declared = [] if len(specs) == 1 else [layout.spec for layout in self.of_shape(shape)]
        specs = declared or specs
        if all(spec.halo != none for spec in specs):
            cells = self._decomposition.rank_shape(self._rank)
            specs = specs + [FieldSpec(none, *axes) for axes in component_axes(shape, cells)]
        if halo:
            specs = [spec for spec in specs if spec.halo != none] or specs
        specs = [
            replace(spec, parity=parity)
            for spec in specs
            for parity in (PARITIES if spec.parity else (None,))
        ]
        expected = f"rank {self._rank} with halo={self._halo} has padded_shape={plain}"
        if not specs and shape == self._decomposition.grid_shape:
            raise FieldError(
                f"array: {shape} is the whole grid's shape: grid.scatter(array) gives each rank its part"
            )
        if not specs and self._is_interior(shape):
            raise FieldError(
                f"array: shape {shape} is that of a staggered field without its halo; give the field itself, no slice "
                "of it and not grid.interior(field), or tell with grid.declare(array, staggered=..., halo=0)"
            )
        if not specs:
            raise FieldError(
                f"array: shape {shape} does not fit the grid: {expected}, component axes in front or behind; allocate "
                "with grid.zeros, or tell with grid.declare(array, components=..., staggered=..., halo=...) if it is "
                "staggered or has another halo"
            )
        if len(specs) > 1:
            raise FieldError(
                f"array: shape {shape} can be read in {len(specs)} ways ({expected}); tell which with "
                "grid.declare(array, components=...), and with its halo, staggered axes or parity, if it has others"
            )
        spec = specs[0] if declared else replace(specs[0], boundary=self._boundary)
        # Also if fields without halo have been declared: an exchange of another array by mistake would do nothing.
        lacks_halo = self._halo != none and spec.halo == none and not any(spec.staggered)
        return self.of(spec), lacks_halo

    def _is_interior(self, shape: tuple[int, ...]) -> bool:
        """Whether this is the shape of a staggered field's own points."""
        for staggered in product((False, True), repeat=len(self._halo)):
            owned = self.of(FieldSpec(self._halo, staggered=staggered)).owned
            if component_axes(shape, tuple(cut.stop - cut.start for cut in owned)):
                return True
        return False

    def of_whole(self, shape: tuple[int, ...], name: str, remedy: str) -> FieldOptions:
        """Return the component axes of a whole field of cells, by the shape of its array.

        Raises `FieldError`, which names the array and the remedy.
        """
        grid_shape = self._decomposition.grid_shape
        fits = component_axes(shape, grid_shape)
        if len(fits) == 1:
            before, after = fits[0]
            return {"components": (*before, ..., *after)}
        ways = f"can be read in {len(fits)} ways" if fits else "does not hold the cells"
        raise FieldError(
            f"{name}: shape {shape} {ways} of a grid of {grid_shape} with component axes in front or behind; {remedy}"
        )

    def _declare(
        self, described: Described, array: object, layout: FieldLayout, number: int
    ) -> None:
        _keep_with(self._declared, _field_key(described), owner(array), layout, number)
        spec = layout.spec
        if any(spec.staggered):
            cuts = zip(described.shape, layout.interior, strict=True)
            self._shapes_of_points.add(tuple([len(range(n)[cut]) for n, cut in cuts]))
        key = spec.without_boundary, spec.boundary == self._boundary
        alike = self._declared_layouts.setdefault(key, [])
        if len(alike) < 2 and layout not in alike:
            alike.append(layout)
            known = [by_shape.pop(layout.padded_shape, None) for by_shape in self._by_shape]
            if any(one is not None and one[0] is not layout for one in known):
                self._forget_results()

    def _forget_results(self) -> None:
        """Discard all results about arrays, since declarations have changed."""
        for table in (self._known, *self._tables):
            table.forget()


_FieldKey = tuple[int, tuple[int, ...], tuple[int, ...], DType]


def _field_key(described: Described) -> _FieldKey:
    return described.pointer, described.shape, described.strides, described.dtype


def _keep_with(table: dict[Any, Any], key: Hashable, watched: object, *values: object) -> None:
    """Set an entry of a table, a weak reference and values; the entry is deleted with the object ``watched``."""

    def forget(reference: object) -> None:
        entry = table.get(key)
        if entry is not None and entry[0] is reference:
            del table[key]

    try:
        table[key] = (weakref.ref(watched, forget), *values)
    except TypeError as error:
        raise FieldError(
            f"a {type(watched).__module__}.{type(watched).__qualname__} cannot be used (it takes no "
            "weak references); give an array of NumPy or CuPy on the same memory"
        ) from error
