"""Verification of the result: three references independent of halox.

- The sine-transform solution. With zero boundary the operator is diagonal in the basis of the
  discrete sine transform (DST-I): mode (p, q) grows by ``centre + 2 cardinal (cos a + cos b) +
  4 diagonal cos a cos b`` per step, with ``a = pi p / (rows + 1)``, ``b = pi q / (cols + 1)``.
  Any number of steps thus takes two transforms.
- A run on one rank, which needs no exchange; results must be equal bit for bit.
- Reference numbers of the original problem (512 x 512, exact weights, float64).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .operator import Stencil, Weights

_VALUES_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Reference:
    """Sum, largest value and three single values of the plane of 512 x 512 points after some steps."""

    total: float
    largest: float
    middle: float
    first: float
    last: float


REFERENCE_SIDE = 512
REFERENCES = {
    1: Reference(1.793505671685e10, 2.73105e5, 6.88128e4, 0.05, 1.5646825e5),
    10: Reference(
        2.759094466495e10, 4.144340426807e5, 1.067512382605e5, 6.997065123090e-1, 4.985788845237e4
    ),
    100: Reference(
        2.162842166816e12, 3.158425652301e7, 8.618066434215e6, 1.030190512208e2, 4.395363643737e5
    ),
    1000: Reference(
        2.307992993266e31,
        3.148568973912e26,
        1.013395567891e26,
        1.435377332409e21,
        4.848994776864e23,
    ),
}
_REFERENCE_TOLERANCE = 1e-11


def sine_transform(values: np.ndarray, axis: int) -> np.ndarray:
    """Return the orthonormal DST-I along an axis; it is its own inverse.

    Examples
    --------
    >>> bool(np.allclose(sine_transform(np.array([[3.0, 4.0]]), 1), [[7 / 2**0.5, -1 / 2**0.5]]))
    True
    """
    lines = np.moveaxis(values, axis, -1)
    out = np.empty(lines.shape)
    n = lines.shape[-1]
    chunk = max(1, _VALUES_AT_ONCE // (2 * n + 2))
    for start in range(0, len(lines), chunk):
        part = lines[start : start + chunk]
        odd = np.zeros((len(part), 2 * n + 2))
        odd[:, 1 : n + 1] = part
        odd[:, n + 2 :] = -part[:, ::-1]
        spectrum = np.fft.rfft(odd, axis=1)
        out[start : start + chunk] = -spectrum.imag[:, 1 : n + 1] / np.sqrt(2 * n + 2)
    return np.moveaxis(out, -1, axis)


def solution(start: np.ndarray, steps: int, weights: Weights) -> np.ndarray:
    """Return the exact float64 field ``steps`` steps after ``start``, with zero boundary."""
    spectrum = sine_transform(sine_transform(start, 1), 0)
    a, b = (np.cos(np.arange(1, n + 1) * np.pi / (n + 1)) for n in start.shape)
    growth = weights.centre + 2 * weights.cardinal * (a[:, None] + b)
    growth += 4 * weights.diagonal * a[:, None] * b
    spectrum *= growth**steps
    return sine_transform(sine_transform(spectrum, 1), 0)


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference divided by the largest expected value; NaN counts as infinite."""
    scale = float(np.abs(expected).max()) or 1.0
    error = float(np.abs(got - expected).max()) / scale
    return error if error == error else float("inf")


def tolerance(dtype: str, steps: int) -> float:
    """Return the largest `relative_error` accepted.

    All terms are positive, so each step adds at most five units in the last place of rounding; the
    sine transforms add a few more.
    """
    return 4 * float(np.finfo(dtype).eps) * (steps + 10)


def one_rank_run(start: np.ndarray, steps: int, weights: Weights, dtype: str) -> np.ndarray:
    """Return the field after ``steps`` steps, computed by NumPy on the undivided plane."""
    old = np.pad(start.astype(dtype), 1)
    new = np.zeros_like(old)
    rows, cols = start.shape
    stencil = Stencil(old, (1, rows + 1), (1, cols + 1), weights)
    for _ in range(steps):
        stencil(old, new)
        old, new = new, old
    return old[1:-1, 1:-1]


def matches_reference(field: np.ndarray, steps: int) -> bool | None:
    """Return whether a field agrees with the reference numbers; None if no reference exists for it.

    Applies to float64, exact weights and initial values that count through the whole plane.
    """
    reference = REFERENCES.get(steps)
    if reference is None or field.shape != (REFERENCE_SIDE, REFERENCE_SIDE):
        return None
    got = (field.sum(), field.max(), field[256, 256], field[0, 0], field[-1, -1])
    expected = (
        reference.total,
        reference.largest,
        reference.middle,
        reference.first,
        reference.last,
    )
    return bool(np.allclose(got, expected, rtol=_REFERENCE_TOLERANCE, atol=0))
