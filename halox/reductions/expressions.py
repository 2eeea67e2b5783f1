"""Expressions of fields: parsed by Python's grammar, typed by NumPy's rules, never run as code.

A text such as ``(a - b) ** 2`` is parsed once, to nested tuples. For given dtypes it becomes a `Program`:
steps, each of which applies one NumPy function to registers. The host runs the steps on blocks of cells, and GPUs run
generated C++. Parts of an expression without fields are computed on the host in every call, as scalars.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import pairwise
from textwrap import dedent
from typing import Any

import numpy as np

from halox.decomposition import FieldLayout, second_images
from halox.domain import Domain
from halox.errors import FieldError, HaloxError
from halox.reductions.cells import Cells, owned_cells, profile_of
from halox.reductions.field_operations import FieldOperation, find_field_operation
from halox.reductions.operations import (
    element,
    wide_dtype,
)
from halox.runtime.arrays import DType
from halox.values import SCALARS, arrays_in, check_unmasked, shortened, shown

MOST_CHARACTERS, MOST_OPERATIONS, MOST_RESULTS, MOST_FIELDS, MOST_POINTERS = 1000, 200, 8, 16, 8
"""Limits of an expression and of a call; kernels have as many parameters."""

_MOST_PARTS = 10_000
"""Most operations of an expression with the intermediate names replaced."""

OPS = ("sum", "min", "max", "norm")
"""Reductions of expressions."""

Tree = tuple[Any, ...]
"""("number", value), ("name", name), or a function of NumPy with its arguments."""

_OPERATORS = {  # of Python's grammar: functions of NumPy, and of Python's module operator
    **{"Add": ("add", "add"), "Sub": ("subtract", "sub"), "Mult": ("multiply", "mul")},
    **{"Div": ("divide", "truediv"), "FloorDiv": ("floor_divide", "floordiv")},
    **{"Mod": ("remainder", "mod"), "Pow": ("power", "pow")},
    **{"BitAnd": ("bitwise_and", "and_"), "BitOr": ("bitwise_or", "or_")},
    **{"USub": ("negative", "neg"), "UAdd": ("positive", "pos"), "Invert": ("invert", "not_")},
    **{"Lt": ("less", "lt"), "LtE": ("less_equal", "le"), "Gt": ("greater", "gt")},
    **{"GtE": ("greater_equal", "ge"), "Eq": ("equal", "eq"), "NotEq": ("not_equal", "ne")},
}
_ON_SCALARS = {"absolute": "abs", **dict(_OPERATORS.values())}
_SAME_NAME = ("sqrt", "exp", "log", "sin", "cos", "where", "minimum", "maximum", "isfinite")
_FUNCTIONS = {"abs": "absolute", "conj": "conjugate", "real": "real", "imag": "imag"}
_FUNCTIONS |= {name: name for name in _SAME_NAME}
WIDE = "wide"  # of `Grid.dot`: converts to the dtype in which sums are formed
_ARGUMENTS = {"where": 3, "minimum": 2, "maximum": 2}  # of other functions: 1
_OF_BOOLS = ("bitwise_and", "bitwise_or", "invert")
_FOR_BOOLS = "{} is for booleans; put comparisons in parentheses, as in (a > 0) & (b > 0)"
_OF_COMPLEX = {"add", "subtract", "multiply", "divide", "negative", "positive", "square", "equal"}
_OF_COMPLEX |= {"not_equal", "absolute", "conjugate", "real", "imag", "isfinite", "where"}
_SAME_VALUE = {"real": "biuf", "conjugate": "biuf", "absolute": "b"}  # by kinds of dtypes
_ALLOWED = (
    "write names, numbers, + - * / // % **, comparisons, & | ~ of comparisons in parentheses, and the functions "
    + ", ".join(_FUNCTIONS)
    + "; lines before the last one are assignments, as in e = a + b"
)


@lru_cache(maxsize=256)
def parse(text: str, of_dot: bool = False) -> tuple[Tree, frozenset[str]]:
    """Return the tree of an expression and the names in it; only the text of `Grid.dot` has the function `WIDE`.

    Names that the lines before the last one assign are replaced.

    Examples
    --------
    >>> parse("2 * u < abs(v)")[0]
    ('less', ('multiply', ('number', 2), ('name', 'u')), ('absolute', ('name', 'v')))
    """
    names, where = set(), f"expression {shortened(text)!r}"
    too_long = FieldError(
        f"{where} is too long: at most {MOST_CHARACTERS} characters and {MOST_OPERATIONS} names, numbers and "
        "operations are possible; compute a part of it in a field"
    )
    if len(text) > MOST_CHARACTERS:
        raise too_long
    try:
        lines, root = _lines(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise FieldError(f"{where}: {getattr(error, 'msg', error)}; {_ALLOWED}") from None
    nodes = [node for part in (*(value for _, value in lines), root) for node in ast.walk(part)]
    if sum(isinstance(node, ast.expr) for node in nodes) > MOST_OPERATIONS:
        raise too_long
    assigned: dict[str, tuple[Tree, int]] = {}  # trees and their sizes
    size = 0

    def of_operator(op: ast.AST) -> str:
        return _OPERATORS[type(op).__name__][0]

    def tree(node: ast.expr) -> Tree:
        nonlocal size
        size += 1
        match node:
            case ast.Name(id=name) if name in assigned:
                size += assigned[name][1]
                return assigned[name][0]
            case ast.Constant(value=bool() | int() | float() | complex() as value):
                return "number", value
            case ast.Name(id=name):
                names.add(name)
                return "name", name
            case ast.UnaryOp(op=op, operand=a):
                return of_operator(op), tree(a)
            case ast.BinOp(left=a, op=op, right=b):
                return of_operator(op), tree(a), tree(b)
            case ast.Compare(left=a, ops=ops, comparators=others):
                sides = pairwise([tree(a), *map(tree, others)])
                parts = [(of_operator(op), *pair) for op, pair in zip(ops, sides, strict=True)]
                return reduce(lambda left, right: ("bitwise_and", left, right), parts)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                function = WIDE if of_dot and name == WIDE else _FUNCTIONS[name]
                if len(args) == _ARGUMENTS.get(name, 1):
                    return function, *map(tree, args)
        raise FieldError(f"{where}: {ast.unparse(node)!r} is not possible; {_ALLOWED}")

    try:
        for name, value in lines:
            before = size
            assigned[name] = tree(value), size - before
        result = tree(root)
    except KeyError as error:  # an operator or a function
        raise FieldError(f"{where}: {error} is not possible; {_ALLOWED}") from None
    if size > _MOST_PARTS:
        raise too_long
    return result, frozenset(names)


def _lines(text: str) -> tuple[list[tuple[str, ast.expr]], ast.expr]:
    """Return the assigned names with their values, and the value of a text; raises `SyntaxError`."""
    with suppress(SyntaxError):
        # Within brackets an expression may have several lines and a comment. As the index of a name it is complete: a
        # text such as "u] + _[u" closes the bracket, and does not parse to an index of this name.
        match ast.parse(f"_[{text}\n]", mode="eval").body:
            case ast.Subscript(value=ast.Name(), slice=root):
                return [], root
    statements, lines = ast.parse(dedent(text)).body, []
    for statement in statements[:-1]:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                lines.append((name, value))
            case _:
                raise SyntaxError(f"{ast.unparse(statement)!r} is not possible")
    if not statements or not isinstance(statements[-1], ast.Expr):
        raise SyntaxError("the last line has no value")
    return lines, statements[-1].value


def _value(tree: Tree, named: Mapping[str, Any]) -> Any:
    """Return the value of a part without fields, by Python's rules for its numbers and NumPy's for NumPy's."""
    function, *args = tree
    if function == "number":
        return args[0]
    if function == "name":
        value = named[args[0]]
        return value[()] if isinstance(value, np.ndarray) else value
    values = [_value(arg, named) for arg in args]
    if function in _OF_BOOLS and not all(isinstance(each, (bool, np.bool_)) for each in values):
        raise ValueError(_FOR_BOOLS.format(function))
    if function in ("power", "exponent") and all(
        isinstance(value, (int, np.integer)) for value in values
    ):
        *base, exponent = map(int, values)
        if exponent < 0 or any(n.bit_length() * exponent > 1024 for n in base):
            raise ValueError(f"exponent {exponent} of an integer; use a float, as in 2.0 ** n")
    if function == "exponent":
        return values[0]
    if function == WIDE:
        return np.asarray(values[0]).astype(wide_dtype(np.asarray(values[0]).dtype))[()]
    if function in _ON_SCALARS:
        result = getattr(operator, _ON_SCALARS[function])(*values)
        if type(result) is complex and all(isinstance(each, (int, float)) for each in values):
            raise ValueError(f"({values[0]}) ** {values[1]} is complex; use a base >= 0")
        return result
    result = getattr(np, function)(*values)
    return result[()] if isinstance(result, np.ndarray) else result


@np.errstate(all="ignore")
def _evaluated(tree: Tree, named: Mapping[str, Any], dtype: DType | None = None) -> Any:
    """Return the value of a part without fields, as an array of shape () if a dtype is given."""
    try:
        value = _value(tree, named)
        return value if dtype is None else np.asarray(value, dtype)
    except Exception as error:  # of Python's and NumPy's arithmetic
        remedy = "" if ";" in str(error) else "; give other numbers, or floats"
        raise FieldError(
            f"expression: a part without fields has no value: {error}{remedy}"
        ) from None


@dataclass(frozen=True)
class Step:
    """One function of NumPy, applied to registers that are first converted to the dtypes ``loop``."""

    function: str
    args: tuple[int, ...]
    loop: tuple[DType, ...]


def _loop(function: str, kinds: list[Any]) -> tuple[DType, ...]:
    """Return the dtypes in which NumPy computes a function: of its arguments and of its result; () if it cannot."""
    if function in ("real", "imag"):
        return kinds[0], np.empty(0, kinds[0]).real.dtype
    if function == "where":
        condition, *others = kinds
        if condition != np.dtype(bool):
            raise FieldError("expression: the condition of where is not boolean; use a comparison")
        values = _loop("maximum", others)
        return (condition, *values) if values else ()
    try:
        loop: tuple[DType, ...] = getattr(np, function).resolve_dtypes((*kinds, None))
    except TypeError:
        return ()
    return loop


class Program:
    """Steps that compute expressions; made from the dtypes of fields, and the values of scalars for their types.

    Registers are numbered: first the inputs, then scalars and results of steps in the order of evaluation. ``dtypes``
    has the dtypes of all registers, ``scalars`` and ``steps`` are by register, ``results`` are registers.
    """

    def __init__(
        self, trees: Iterable[Tree], inputs: Mapping[str, DType], named: Mapping[str, Any]
    ) -> None:
        self.dtypes = list(inputs.values())
        self.scalars: dict[int, Tree] = {}
        self.steps: dict[int, Step] = {}
        self._inputs, self._named = {name: n for n, name in enumerate(inputs)}, named
        self._known: dict[object, int] = {}
        parts = [self._compiled(tree) for tree in trees]
        self.results = [
            part if isinstance(part, int) else self._scalar(part, np.dtype(self._kind(part)))
            for part in parts
        ]

    def values(self, named: Mapping[str, Any]) -> list[Any]:
        """Return the scalars of a call as NumPy arrays of shape (), in the order of ``scalars``."""
        return [
            _evaluated(tree, named, self.dtypes[register])
            for register, tree in self.scalars.items()
        ]

    def _compiled(self, tree: Tree) -> int | Tree:
        """Return the register of a part, or the part itself if it has no fields."""
        function, *args = tree
        if function in ("number", "name"):
            return self._inputs.get(args[0], tree) if function == "name" else tree
        parts = [self._compiled(arg) for arg in args]
        return self._step(function, parts) if any(isinstance(part, int) for part in parts) else tree

    def _kind(self, part: int | Tree) -> Any:
        """Return the dtype of a part, or int, float or complex for a Python number, as NumPy's promotion needs it."""
        if isinstance(part, int):
            return self.dtypes[part]
        value = _evaluated(part, self._named)
        return type(value) if type(value) in (int, float, complex) else np.asarray(value).dtype

    def _step(self, function: str, parts: list[int | Tree]) -> int:
        kinds = [self._kind(part) for part in parts]
        if function == "power" and parts[1] in (("number", 2), ("number", 0.5)):
            # As NumPy's operator does; a literal, so that the step does not depend on the call.
            is_two = parts[1] == ("number", 2)
            if kinds[0].kind == "f" or (is_two and kinds[1] is int) or kinds[0].kind == "c":
                function = "square" if is_two else "sqrt"
                parts, kinds = parts[:1], kinds[:1]
        if function == WIDE and isinstance(parts[0], int):
            wide = wide_dtype(kinds[0])
            return self._register((WIDE, parts[0]), wide, Step("positive", (parts[0],), (wide,)))
        if function == "imag" and kinds[0].kind != "c":
            return self._scalar(("number", 0), kinds[0])
        if isinstance(parts[0], int) and kinds[0].kind in _SAME_VALUE.get(function, ()):
            return parts[0]
        if function in _OF_BOOLS and any(kind not in (bool, np.dtype(bool)) for kind in kinds):
            raise FieldError(f"expression: {_FOR_BOOLS.format(function)}")
        loop, wrong = _loop(function, kinds), ""
        if not loop:
            wrong = "has no meaning; convert booleans, as in 1 * a"
        elif any(not element(dtype) or not dtype.isnative for dtype in loop):
            wrong = (
                f"computes in {loop[-1]}, which expressions do not support; convert, as in 1.0 * a"
            )
        elif function not in _OF_COMPLEX and any(dtype.kind == "c" for dtype in loop):
            wrong = "has no complex numbers in expressions; use real(a), imag(a) and abs(a)"
        elif function == "power" and loop[-1].kind in "iu":
            if isinstance(parts[1], int):
                wrong = "is for integer scalars as exponents of integers; convert, as in 1.0 * a"
            else:
                parts = [parts[0], ("exponent", parts[1])]
        if wrong:
            shown_kinds = ", ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
            raise FieldError(f"expression: {function} of {shown_kinds} {wrong}")
        args = tuple(
            part if isinstance(part, int) else self._scalar(part, dtype)
            for part, dtype in zip(parts, loop[:-1], strict=True)
        )
        step = Step(function, args, loop[:-1])
        return self._register(step, loop[-1], step)

    def _scalar(self, tree: Tree, dtype: DType) -> int:
        register = self._register((repr(tree), dtype), dtype, None)
        self.scalars[register] = tree
        return register

    def _register(self, key: object, dtype: DType, step: Step | None) -> int:
        """Return the register with a value, a new one if no earlier step has computed it."""
        register = self._known.setdefault(key, len(self.dtypes))
        if register == len(self.dtypes):
            self.dtypes.append(dtype)
            if step is not None:
                self.steps[register] = step
        return register


@dataclass(frozen=True)
class Request:
    """Arguments of `Grid.reduce`, or of the method ``call``: ``keys`` of the results, None for a single result."""

    call: str
    keys: tuple[Any, ...] | None
    texts: tuple[str, ...]
    ops: tuple[str, ...]
    outs: tuple[Any, ...]
    named: Mapping[str, Any]
    is_exact: bool = False  # sums are reproducible
    is_unique: bool = False  # sums leave out second images of points

    @property
    def title(self) -> tuple[object, ...]:
        """Key of the reductions with these texts."""
        return ("expressions", self.is_exact, self.is_unique, *self.ops, *self.texts)

    def arrays(self) -> tuple[Any, ...]:
        """Return the arrays of the call, by which later calls find its launch."""
        return *arrays_in(self.named.values()), *self.outs


def returning(keys: Sequence[Any] | None) -> Callable[[Sequence[Any]], Any]:
    """Return the function that gives results the form of a call: a dict with ``keys``, None for a single result."""
    if keys is None:
        return operator.itemgetter(0)
    return lambda results: dict(zip(keys, results, strict=True))


def requested(call: str, expression: Any, op: Any, out: Any, named: Mapping[str, Any]) -> Request:
    """Check the form of a call's arguments."""
    keys: tuple[Any, ...] | None = None
    texts: tuple[Any, ...] = (expression,)
    ops: tuple[Any, ...] = (op,)
    outs: tuple[Any, ...] = () if out is None else (out,)
    if isinstance(expression, dict):
        keys, texts = tuple(expression), tuple(expression.values())
        if not 1 <= len(keys) <= MOST_RESULTS:
            raise FieldError(f"{len(keys)} expressions; give 1 to {MOST_RESULTS} in a call")
        each = {"op": dict.fromkeys(keys, op) if isinstance(op, str) else op}
        each |= {} if out is None else {"out": out}
        for name, given in each.items():
            if not isinstance(given, dict) or set(given) != set(keys):
                raise FieldError(
                    f"{name}: expected a dict with the keys of the expressions, {shown(list(keys))}, got {shown(given)}"
                )
        ops = tuple(each["op"][key] for key in keys)
        outs = tuple(out[key] for key in keys) if out is not None else ()
    for text, name in zip(texts, ops, strict=True):
        if not isinstance(text, str):
            given = type(text).__name__
            raise FieldError(f"expression: expected text, got {given}; give fields by keyword")
        if not isinstance(name, str) or name not in OPS:
            known = ", ".join(map(repr, OPS))
            raise FieldError(f"op of an expression must be one of {known}, got {shown(name)}")
    return Request(call, keys, texts, ops, outs, named)


def parted(request: Request) -> Iterator[tuple[Any, tuple[str, str, Any], dict[str, Any]]]:
    """Yield the calls for each result: its key; expression, operation and ``out``; and the keywords in it."""
    names = [parse(text, request.call == "dot")[1] for text in request.texts]
    unused = request.named.keys() - frozenset[str]().union(*names)  # an error of each call
    outs = request.outs or (None,) * len(names)
    each = zip(request.texts, request.ops, outs, strict=True)
    for key, arguments, own in zip(request.keys or (), each, names, strict=True):
        yield key, arguments, {n: v for n, v in request.named.items() if n in own | unused}


@dataclass(frozen=True)
class Typed:
    """A call with the program for its dtypes, whose inputs are ``cells``, ``arrays`` and ``axes``."""

    program: Program
    ops: tuple[FieldOperation, ...]
    dtypes: tuple[DType, ...]  # of the results
    names: tuple[str, ...]  # of the cells: fields and profiles
    cells: list[Cells]
    arrays: list[Any]  # of shape (), on the GPU
    axes: list[tuple[int, int]]  # of each index: axis in the array, this rank's first index
    meaning: str  # equal on all ranks

    def without_arrays(self) -> Typed:
        """Return the call without references to its arrays, to be kept."""
        cells = [replace(cells, field=None) for cells in self.cells]
        return replace(self, cells=cells, arrays=[None for _ in self.arrays])

    @property
    def inputs(self) -> int:
        return len(self.cells) + len(self.arrays) + len(self.axes)


def typed(request: Request, domain: Domain) -> Typed:
    """Return the program of a call, and the cells of its fields."""
    parsed = [parse(text, request.call == "dot") for text in request.texts]
    used = frozenset[str]().union(*(names for _, names in parsed))
    indices = {f"index_{name}": axis for axis, name in enumerate(domain.labels.dims)}
    named, kinds = request.named, {name: _role(value) for name, value in request.named.items()}
    fields, profiles, pointers = (
        tuple(sorted(name for name, kind in kinds.items() if kind == one))
        for one in ("field", "profile", "pointer")
    )
    for name, value in named.items():
        check_unmasked(value, name)
        if name in indices:
            raise FieldError(f"{name} is the index along an axis; give the argument another name")
        if name not in used:
            raise FieldError(f"{name} is not in the expression; leave it out, or use it")
    for name in sorted(used):
        if name in ("op", "out", "axis", "reproducible"):
            raise FieldError(
                f"expression: {name!r} is a parameter of the call; give the field or number another name"
            )
        if name not in named and name not in indices:
            raise FieldError(
                f"expression: the name {name!r} is not given; give it as a keyword, {name}=...; indices are "
                f"{', '.join(indices)}"
            )
    if not fields or len(fields + profiles) > MOST_FIELDS or len(pointers) > MOST_POINTERS:
        raise FieldError(
            f"expression: {len(fields)} fields, {len(profiles)} profiles and {len(pointers)} arrays of shape (); give "
            f"1 to {MOST_FIELDS} fields and profiles, as in u=u, and at most {MOST_POINTERS} of the others"
        )
    for name in pointers:
        if not isinstance(named[name], domain.xp.ndarray):
            raise FieldError(f"{name} is not an array of {domain.xp.__name__}; use float({name})")
    cells = [_cells(name, named[name], domain) for name in fields]
    specs = [cell.layout.spec for cell in cells]
    for name, spec in zip(fields, specs, strict=True):
        if spec.of_cells != specs[0].of_cells:
            raise FieldError(
                f"{name} and {fields[0]} have unlike layouts ({spec}; {specs[0]}); give fields of the same components, "
                "staggering and parity"
            )
        if request.is_unique and spec.positions != specs[0].positions:
            raise FieldError(
                f"unique: the points of {name} and {fields[0]} are at other places of their cells ({spec}; {specs[0]})"
            )
    trees = [tree for tree, _ in parsed]
    if request.is_unique and (text := _second_images(cells[0].layout, [*indices])):
        second, names = parse(text)
        used |= names
        trees = [
            tree if op in ("min", "max") else ("where", second, ("number", 0), tree)
            for tree, op in zip(trees, request.ops, strict=True)
        ]
    grid, owned = specs[0].grid_axes, cells[0].layout.owned
    axes = [(grid[axis], owned[axis].start) for name, axis in indices.items() if name in used]
    if (axes or profiles) and specs[0].parity is not None:
        raise FieldError(
            "expression: a field of one parity has no indices and profiles; make them a field"
        )
    cells += [profile_of(name, named[name], cells[0], domain) for name in profiles]
    fields += profiles
    inputs = {name: cell.dtype for name, cell in zip(fields, cells, strict=True)}
    inputs |= {name: np.dtype(named[name].dtype) for name in pointers}
    for name, dtype in inputs.items():
        if not element(dtype) or not dtype.isnative:
            raise FieldError(
                f"{name}: dtype {dtype} is not possible in an expression; convert to bool, integers, float32, float64, "
                "complex64 or complex128 in the machine's byte order"
            )
    inputs |= {name: np.dtype("i8") for name in indices if name in used}
    scalars = {name: named[name] for name, kind in kinds.items() if kind == "scalar"}
    program = Program(trees, inputs, scalars)
    values = [program.dtypes[register] for register in program.results]
    found = [
        find_field_operation(op, (dtype,), request.is_exact)
        for op, dtype in zip(request.ops, values, strict=True)
    ]
    ops = tuple(operation for operation, _ in found)
    products = [s for s in program.steps.values() if s.function in ("multiply", "divide", "square")]
    if any(op.is_exact for op in ops) and any(step.loop[0].kind == "c" for step in products):
        raise FieldError(
            "reproducible: products and quotients of complex numbers are rounded differently by different CPUs; "
            "use real(a) and imag(a), or give reproducible=False"
        )
    shown_inputs = {name: str(dtype) for name, dtype in inputs.items()}
    shown_inputs |= {name: f"{inputs[name]} along {named[name][0]}" for name in profiles}
    of_scalars = [str(program.dtypes[register]) for register in program.scalars]
    return Typed(
        program,
        ops,
        tuple(dtype for _, dtype in found),
        *(fields, cells, [named[name] for name in pointers], axes),
        f"{', '.join(map(str, ops))} of {', '.join(map(repr, request.texts))} of {shown_inputs}, scalars {of_scalars}, "
        f"{specs[0]}, unique={request.is_unique}",
    )


def _second_images(layout: FieldLayout, indices: Sequence[str]) -> str:
    """Return the condition of points that are images of other ones, an expression of the indices; or ""."""
    extents = layout.global_shape[layout.spec.grid_slice]
    boxes = []
    for box in second_images(layout):
        cuts = zip(indices, box, extents, strict=True)
        ends = [(name, *cut) for name, cut, points in cuts if cut != (0, points)]
        boxes.append(" & ".join(f"({a} <= {name}) & ({name} < {b})" for name, a, b in ends))
    return " | ".join(boxes)


def _cells(name: str, field: Any, domain: Domain) -> Cells:
    try:
        return owned_cells(field, domain.layouts.find_cells(field))
    except HaloxError as error:
        raise type(error)(f"{name}: {error}") from None


def _role(value: Any) -> str:
    """Return the role of a keyword: "field", "profile", "pointer" (an array of shape () on a GPU) or "scalar"."""
    if isinstance(value, tuple):
        return "profile"
    if isinstance(value, SCALARS):
        return "scalar"
    if getattr(value, "shape", None) != ():
        return "field"
    return "scalar" if isinstance(value, np.ndarray) else "pointer"
