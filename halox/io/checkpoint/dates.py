"""Times of records: numbers, or dates stored as numbers with CF's ``units`` and ``calendar``, which xarray decodes."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any, TypeAlias

import numpy as np

from halox.domain.dimension_names import Coordinates
from halox.errors import FieldError
from halox.values import has_unit, shown

Time: TypeAlias = float | np.datetime64 | datetime
"""A number or a date; dates of cftime, too."""

Dates: TypeAlias = dict[str, str]
"""CF's attributes ``units`` and ``calendar`` of dates that are stored as numbers; empty for numbers."""


def _dates_since(first: Any) -> Dates:
    """Return the attributes of numbers of seconds since the day of a date."""
    day = f"{first.year:04d}-{first.month:02d}-{first.day:02d}"
    calendar = getattr(first, "calendar", "proleptic_gregorian")
    return {"units": f"seconds since {day}", "calendar": calendar}


def _seconds(date: Any, dates: Dates) -> float:
    """Return the number of a date in the calendar of ``dates``."""
    year, month, day = map(int, dates["units"].split()[-1].rsplit("-", 2))
    midnight = date.replace(hour=0, minute=0, second=0, microsecond=0)
    return float((date - midnight.replace(year=year, month=month, day=day)).total_seconds())


def _date_of(value: Any) -> Any:
    """Return a date of NumPy, Python or cftime as one of datetime or cftime; None for anything else."""
    is_cut = getattr(value, "nanosecond", 0) > 0  # of pandas
    if has_unit(value) and value.dtype.kind == "M" and not value.shape:
        rounded = value.astype("M8[us]")
        is_cut = rounded != value and not np.isnat(value)
        value = rounded.item()  # an int outside the years 1 to 9999
    if is_cut:
        raise FieldError("time: dates are stored in microseconds; round it, as by astype('M8[us]')")
    if isinstance(value, datetime) and value.tzinfo is not None:
        value = value.astimezone(UTC).replace(tzinfo=None)
    is_date = isinstance(value, datetime) or hasattr(value, "calendar")
    return value if is_date and value == value else None  # NaT of pandas is unlike itself


def time_of(time: Any, known: Dates | None) -> tuple[float, Dates]:
    """Return a time as a number, and the attributes of times: ``known``, unless it is the first time.

    Raises `FieldError`.
    """
    date = None if isinstance(time, (int, float)) else _date_of(time)
    number, new = (_number_of(time), {}) if date is None else (0.0, _dates_since(date))
    known = new if known is None else known
    if new.get("calendar") != known.get("calendar"):
        new_one, old = (f"the calendar {d['calendar']}" if d else "none" for d in (new, known))
        raise FieldError(
            f"time: calendars differ: {shown(time)} has {new_one}, earlier times {old}"
        )
    return (_seconds(date, known) if known else number), known


def _number_of(time: Any) -> float:
    try:
        value = float("nan") if isinstance(time, (bool, str)) or has_unit(time) else float(time)
    except (TypeError, ValueError, OverflowError):
        value = float("nan")
    if not math.isfinite(value):
        raise FieldError(
            f"time: expected a finite number without a unit, or a date and time, got {shown(time)}"
        )
    return value


def encoded(name: str, along: Coordinates) -> Coordinates:
    """Return coordinates with numbers in place of dates; raises `FieldError`."""
    if along.values.dtype.kind != "M":
        return along
    dates = [_date_of(value) for value in along.values]
    if None in dates:
        raise FieldError(f"coords[{name!r}]: expected dates, got {shown(along.values)}")
    stored = _dates_since(dates[0])
    numbers = np.array([_seconds(date, stored) for date in dates])
    return Coordinates(numbers, along.attrs | stored)
