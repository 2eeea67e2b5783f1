"""Random expressions of fields, and their values by Python's `eval` with NumPy's functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

FUNCTIONS = {
    "abs": abs,
    "conj": np.conj,
    **{
        name: getattr(np, name)
        for name in ("sqrt", "exp", "log", "sin", "cos", "where", "minimum", "maximum")
    },
    **{name: getattr(np, name) for name in ("real", "imag", "isfinite")},
}

FIELDS = {
    "bool": ("m", "n"),
    "int": ("i", "j", "k", "index_x"),
    "float": ("a", "b", "c"),
    "complex": ("u", "v"),
}
"""Names of fields by kind."""

DTYPES = dict.fromkeys("mn", ("?",)) | {"i": ("i2", "i4"), "j": ("i8",), "k": ("u1", "u4", "u8")}
DTYPES |= {"a": ("f8",), "b": ("f4",), "c": ("f4", "f8"), "u": ("c16",), "v": ("c8", "c16")}


def evaluated(text: str, named: Mapping[str, Any]) -> Any:
    """Return the value by NumPy."""
    with np.errstate(all="ignore"):
        return eval(text, {"__builtins__": {}}, {**FUNCTIONS, **named})


def values(name: str, dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Return values of a field, with zeros among them."""
    found = np.round(rng.normal(size=shape) * 4, 1)
    if np.dtype(dtype).kind == "c":
        return (found + 1j * np.round(rng.normal(size=shape), 2)).astype(dtype)
    if np.dtype(dtype).kind == "u":
        found = abs(found)
    return (found > 0 if dtype == "?" else found).astype(dtype)


class Writer:
    """Writes expressions whose dtypes are all supported."""

    def __init__(self, rng: np.random.Generator, scalars: Mapping[str, str]) -> None:
        self._rng, self._scalars = rng, scalars

    def _one(self, *choices: str) -> str:
        return choices[self._rng.integers(len(choices))]

    def write(self, kind: str, depth: int) -> str:
        """Return an expression of a kind: "bool", "int", "float" or "complex"."""
        if depth == 0:
            leaves = list(FIELDS[kind])
            if kind != "bool":
                leaves += [{"int": "3", "float": "1.5", "complex": "(1 - 2.5j)"}[kind]]
                leaves += [name for name, of in self._scalars.items() if of == kind]
            return self._one(*leaves)

        def part(of: str, *others: str) -> str:
            return self.write(self._one(of, *others), int(self._rng.integers(depth)))

        def real() -> str:
            return part("float", "int")

        def number() -> str:
            return part("complex", "float", "int")

        field = self._one(*FIELDS["int"], *FIELDS["float"])
        if kind == "bool":
            return self._one(
                f"({real()} {self._one('<', '<=', '>', '>=', '==', '!=')} {field})",
                f"({field} {self._one('<', '<=', '>', '>=', '==', '!=')} {real()})",
                f"({part('bool')} {self._one('&', '|')} {part('bool')})",
                f"(~{part('bool')})",
                f"isfinite({number()})",
                f"({number()} {self._one('==', '!=')} {self._one(*FIELDS['complex'])})",
            )
        if kind == "int":
            return self._one(
                f"({part('int')} {self._one('+', '-', '*', '//', '%')} {part('int')})",
                f"({part('int')} ** {self._one('2', '3', '0')})",
                f"(-{part('int')})",
                f"abs({part('int')})",
                f"where({part('bool')}, {part('int')}, {part('int')})",
                f"{self._one('minimum', 'maximum')}({part('int')}, {part('int')})",
                f"({part('bool')} * {part('int')})",
            )
        if kind == "float":
            return self._one(
                f"({real()} {self._one('+', '-', '*', '/', '//', '%')} {part('float')})",
                f"({part('float')} {self._one('+', '-', '*', '/', '//', '%')} {real()})",
                f"({part('float')} ** {self._one('2', '0.5', '3', '1.5')})",
                f"{self._one('sin', 'cos', 'exp', 'sqrt', 'log')}({part('float')})",
                f"{self._one('real', 'imag', 'abs')}({part('complex')})",
                f"{self._one('minimum', 'maximum')}({real()}, {part('float')})",
                f"where({part('bool')}, {part('float')}, {real()})",
                f"(-{part('float')})",
            )
        return self._one(
            f"({part('complex')} {self._one('+', '-', '*', '/')} {number()})",
            f"({number()} {self._one('+', '-', '*', '/')} {part('complex')})",
            f"conj({part('complex')})",
            f"where({part('bool')}, {part('complex')}, {number()})",
            f"({part('complex')} ** 2)",
            f"(+{part('complex')})",
        )
