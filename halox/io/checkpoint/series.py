"""Values of fields to store in an output: records, or means, minima and maxima over windows of records; rounded.

`halox.Output` adds each record to an `Accumulator` of this rank, on the field's device, and writes its values after the
last record of a window. If a restart has begun inside the window, these are NaN::

    records    0 1 2 3 | 4 5 6 7 | 8 9 ...
    windows       0    |    1    |          every 4 records
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from halox.decomposition.blocks import BLOCK, blocks
from halox.errors import FieldError
from halox.io.checkpoint import arguments
from halox.io.checkpoint.arguments import CallerField
from halox.runtime.arrays import DType
from halox.runtime.gpu.devices import allocate, array_module
from halox.runtime.gpu.streams import StreamOrder
from halox.values import as_int, shown

KEPT_BITS = "_QuantizeBitRoundNumberOfSignificantBits"
"""Attribute of rounded arrays, as netCDF, CDO and xbitinfo write it."""

_METHODS = {"mean": "mean", "min": "minimum", "max": "maximum"}
"""Methods of CF's ``cell_methods`` by the arguments of `halox.Output`."""


class Series(NamedTuple):
    """A variable of an output: the records of a field, or its values over windows of records."""

    field: str
    method: str  # of CF; empty for records
    every: int
    dtype: DType  # stored
    keepbits: int  # 0 for all


def series_of(
    fields: Mapping[str, CallerField],
    every: Mapping[str, int],
    windows: Mapping[str, object],
    keepbits: object,
) -> dict[str, Series]:
    """Return the variables of an output by name: "u_mean" if ``windows["mean"]`` has "u"; raises `FieldError`."""
    bits = arguments.mapping_of("keepbits", keepbits, fields)
    found = {name: (name, "", field.described.dtype) for name, field in fields.items()}
    for argument, given in windows.items():
        names = arguments.names_of(given, argument) or ()
        arguments.check_names(argument, names, arguments.without_tables(fields))
        for name in names:
            stored, dtype = f"{name}_{argument}", fields[name].described.dtype
            if name not in every or stored in fields:
                raise FieldError(
                    f"{argument}: {name} needs a number of records, as in every={{{name!r}: 24}}, and no field {stored}"
                )
            if dtype.kind not in ("biufc" if argument == "mean" else "biuf"):
                raise FieldError(f"{argument}: {name} of {dtype} has no {argument}; leave it out")
            found.pop(name, None)
            found[stored] = name, argument, np.dtype("f8") if dtype.kind in "biu" else dtype
    series = {}
    for stored, (name, argument, dtype) in sorted(found.items()):
        kept, most = bits.get(name), np.finfo(dtype).nmant if dtype.char in "efdFD" else 0
        if name in bits and not 1 <= (as_int(kept) or 0) <= most:
            raise FieldError(
                f"keepbits: {name} of {dtype} has {most} mantissa bits to keep, got {shown(kept)}"
            )
        method, n = _METHODS.get(argument, ""), every.get(fields[name].table or name, 1)
        series[stored] = Series(name, method, n, dtype, as_int(kept) or 0)
    return series


class Accumulator:
    """Values of a series, in memory of its own on the device of the field's cells.

    Means are added in float64 or complex128, as by `Grid.sum`.
    """

    def __init__(self, series: Series, cells: Any) -> None:
        device = None if isinstance(cells, np.ndarray) else int(cells.device.id)
        self._series, self._xp, self._order = series, array_module(device), StreamOrder()
        self.values = self._total = allocate(cells.shape, series.dtype, device)
        wide = np.result_type(series.dtype, "f8")
        if series.method == "mean" and wide != series.dtype:
            self._total = allocate(cells.shape, wide, device)
        self._window = series.every if series.method else 1
        self._records = 0  # of the present window

    def add(self, cells: Any, number: int) -> None:
        """Take in a record: one pass over its cells, on a GPU one launch; the last one of a window sets ``values``."""
        xp, series, place = self._xp, self._series, number % self._window
        if xp is not np:
            self._order.follow(xp.cuda.get_current_stream())
        if place == 0:
            xp.copyto(self._total, cells)
            self._records = 1
        elif place == self._records:
            combine = {"mean": xp.add, "minimum": xp.minimum, "maximum": xp.maximum}
            combine[series.method](self._total, cells, out=self._total)
            self._records += 1
        if place + 1 < self._window:
            return
        if self._records < self._window:
            self.values[...] = np.nan
        elif series.method == "mean":
            xp.divide(self._total, self._window, out=self.values)
        if series.keepbits:
            round_mantissas(self.values, series.keepbits, xp)


def round_mantissas(values: Any, keepbits: int, xp: ModuleType) -> None:
    """Round an array of NumPy or CuPy in place, halves to even, as BitRound of numcodecs; infinities and NaN stay."""
    if values.dtype.kind == "c":
        round_mantissas(values.real, keepbits, xp)
        round_mantissas(values.imag, keepbits, xp)
        return
    bits = values.view(values.dtype.str.replace("f", "u"))
    number, drop = bits.dtype.type, np.finfo(values.dtype).nmant - keepbits
    if drop == 0:
        return
    # On GPUs few launches, but intermediate values that are small beside a large field.
    for place in blocks(values.shape, BLOCK if xp is np else 1 << 24):
        rounded = bits[place] >> number(drop)
        rounded &= number(1)  # the last kept bit: a half is rounded up if it is odd
        rounded += number((1 << drop - 1) - 1)
        rounded += bits[place]
        rounded &= ~number((1 << drop) - 1)
        xp.copyto(bits[place], rounded, where=xp.isfinite(values[place]))
