"""Rules for imports: downward only, CuPy in few rooms, and public names in apps, examples and most tests."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import halox
import halox.datatypes
from halox.errors import MissingPackageError

ROOT = Path(__file__).resolve().parents[2]

# Floors from the lowest to the highest; each is a list of rooms. Modules of one room may import each other. A module
# is in the room with the longest prefix of its name. The package `halox` itself, for users, is above the library, whose
# modules import from each other by full names, and below the command line, which is not part of the library.
FLOORS: list[list[set[str]]] = [
    [{"halox.errors"}, {"halox._version"}],
    [{"halox.values"}, {"halox.tables"}],
    [{"halox.datatypes"}, {"halox.decomposition"}],
    [{"halox.runtime"}],
    [{"halox.packing"}],
    [{"halox.paths"}],
    [{"halox.domain"}],
    [{"halox.reductions"}],
    [{"halox.plans"}],
    [{"halox.io"}, {"halox.solvers"}],
    [{"halox.sampling"}, {"halox.xarray"}],
    [{"halox.grid"}],
    [{"halox.cubed_sphere"}, {"halox.torch"}],
    [{"halox.fft"}],
    [{"halox.timeline"}],
    [{"halox"}],
    [{"halox.cli"}, {"halox.testing"}],
    [{"halox.__main__"}],
]
PLACES = {
    module: (floor, number)
    for floor, rooms in enumerate(FLOORS)
    for number, room in enumerate(rooms)
    for module in room
}
CUPY_ROOMS = (
    "halox.runtime",
    "halox.packing",
    "halox.paths",
    "halox.reductions.device",
    "halox.fft.cufft",
)


def files_under(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def in_package(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@cache
def place(name: str) -> tuple[int, int]:
    """Return the floor of a module (or of a name in it), and the number of its room on that floor."""
    longest = max((module for module in PLACES if in_package(name, module)), key=len)
    if longest == "halox" and name != "halox":
        # A name in the package itself, as in `from halox import Grid`. Modules must have a room.
        path = ROOT / name.replace(".", "/")
        assert not path.exists() and not path.with_suffix(".py").exists(), f"{name} has no room"
    return PLACES[longest]


def statements(tree: ast.AST, *, at_import: bool = False) -> Iterator[ast.AST]:
    """Yield all statements of a module, or those that importing it runs."""
    pending = [tree]
    while pending:
        node = pending.pop()
        yield node
        inner = ast.iter_child_nodes(node)
        if at_import and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if at_import and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            inner = iter(node.orelse)
        # No expression has a statement inside.
        pending += [one for one in inner if not isinstance(one, ast.expr)]


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield all imports of a module, including imports in functions and for type checking."""
    for node in statements(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = module.split(".")
                anchor = anchor[: len(anchor) - node.level + is_package]
                base = ".".join([*anchor, *filter(None, [base])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def imports_of(path: Path) -> list[tuple[int, str]]:
    return list(imports(tree_of(path), module_name(path), path.name == "__init__.py"))


def runs_at_import(path: Path) -> list[str]:
    """Return the modules that importing a module imports."""
    names = []
    for node in statements(tree_of(path), at_import=True):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
    return names


def test_imports_go_downward() -> None:
    wrong = []
    for path in files_under("halox"):
        importer = place(module_name(path))
        for line, name in imports_of(path):
            if in_package(name, "halox"):
                imported = place(name)
                same_room = imported == importer and name != "halox"
                if imported[0] >= importer[0] and not same_room:
                    wrong.append(f"{shown(path)}:{line}: floor {importer[0]} imports {name}")
    assert not wrong


def test_no_module_imports_itself_through_others() -> None:
    """Imports in functions and for type checkers count, except of the package `halox` itself."""
    modules = {module_name(path): path for path in files_under("halox")}
    imported = {
        name: {one for _, full in imports_of(path) if (one := module_of(full, modules)) != name}
        for name, path in modules.items()
    }
    reached = {name: set(imported[name]) for name in modules}
    changed = True
    while changed:
        changed = False
        for others in reached.values():
            more = set().union(*(imported[one] for one in others if one in imported)) - others
            changed = changed or bool(more)
            others |= more
    assert not [name for name in modules if name in reached[name]]


def module_of(name: str, modules: dict[str, Path]) -> str:
    """Return the module that an imported name is or is in."""
    return name if name in modules else name.rpartition(".")[0]


def test_cupy_stays_in_its_rooms_and_lazy() -> None:
    wrong = []
    for path in files_under("halox"):
        names = [name for _, name in imports_of(path) if in_package(name, "cupy")]
        if names and not in_package(module_name(path), *CUPY_ROOMS):
            wrong.append((shown(path), names))
        eager = [name for name in runs_at_import(path) if name.startswith(("cupy", "cuda"))]
        if eager:
            wrong.append((f"{shown(path)} outside of a function", eager))
    assert not wrong


def test_one_module_imports_torch_and_says_that_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = {
        shown(path)
        for path in files_under("halox")
        for _, name in imports_of(path)
        if in_package(name, "torch", "halox.torch")
    }
    assert wanted == {"halox/torch.py"}
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "halox.torch", raising=False)
    with pytest.raises(MissingPackageError, match="pip install torch"):
        importlib.import_module("halox.torch")


PUBLIC = {"halox", "halox.datatypes", "halox.torch", "halox.xarray"}
PUBLIC |= {f"halox.{name}" for name in halox.__all__}
PUBLIC |= {f"halox.datatypes.{name}" for name in halox.datatypes.__all__}


def test_apps_and_examples_use_public_names() -> None:
    wrong = [
        f"{shown(path)}:{line}: {name}"
        for path in files_under("apps") + files_under("examples")
        for line, name in imports_of(path)
        if (in_package(name, "halox") and name not in PUBLIC) or in_package(name, "cupy")
    ]
    assert not wrong


PUBLIC_FOR_TESTS = PUBLIC | {"halox.paths", "halox.paths.PATHS", "halox.paths.register"}
PUBLIC_MODULES = (
    "halox.errors",
    "halox.testing",
    "halox.torch",
    "halox.xarray",
    "halox.cli.launcher",
)

STILL_INSIDE = {
    "calls",
    "conftest",
    "faults/checkpoints",
    "faults/outputs",
    "faults/rank",
    "limits",
    "mpi/limits",
    "mpi/test_loops",
    "mpi/test_output",
    "mpi/test_prediction",
    "mpi/ways",
    "support",
}
"""Files of tests that import from the inside of halox although they belong to no room; no file may be added."""


def test_tests_outside_the_rooms_use_public_names() -> None:
    """Tests of a room, which know its inside, are in tests/unit/<room>, tests/mpi/<room>, and tests/gpu."""
    found: dict[str, list[str]] = {}
    for path in files_under("tests"):
        folder, *inner = path.relative_to(ROOT / "tests").parts
        in_a_room = folder in ("unit", "mpi") and len(inner) > 1
        if in_a_room or folder in ("gpu", "fakes"):
            continue
        file = path.relative_to(ROOT / "tests").with_suffix("").as_posix()
        for _, name in imports_of(path):
            is_public = name in PUBLIC_FOR_TESTS or in_package(name, *PUBLIC_MODULES)
            if in_package(name, "halox") and not is_public:
                found.setdefault(file, []).append(name)
    new = {file: names for file, names in found.items() if file not in STILL_INSIDE}
    assert not new, "move these tests into a room, or write them with public names"
    assert {*found} == STILL_INSIDE, "take the files that no longer do so off the list"


OUTSIDE = {"_replace", "_SubParsersAction"}
"""Documented names of the standard library that begin with an underscore."""


def private_names(tree: ast.AST) -> list[str]:
    """Return the private attributes, and private names of other modules, that a module reaches for.

    The attributes of the module's own classes do not count.
    """
    own, reached = set(OUTSIDE), list[ast.Attribute]()
    names = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            own.update({node.attr} if is_own else ())
            reached.append(node)
        elif isinstance(node, ast.ImportFrom) and in_package(node.module or "", "halox"):
            names += [alias.name for alias in node.names if is_private(alias.name)]
    return names + [ast.unparse(node) for node in reached if node.attr not in own]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_module_reaches_into_objects_of_others() -> None:
    found = {shown(path): private_names(tree_of(path)) for path in files_under("halox")}
    assert not {path: names for path, names in found.items() if names not in ([], ["_version"])}


def test_datatypes_and_decomposition_need_no_mpi_to_import() -> None:
    for path in files_under("halox/datatypes") + files_under("halox/decomposition"):
        eager = [name for name in runs_at_import(path) if in_package(name, "mpi4py")]
        assert not eager, f"{shown(path)} imports mpi4py outside of a function"


MOST_MODULES = 124
"""Largest number of modules of halox that ``import halox`` may load."""

FOR_GPUS = ("halox.reductions.device", "halox.packing.device", "cupy", "cuda")
"""Beginnings of the names of modules that only GPUs need; the paths, and what they use, are imported at once."""

LOADED = """
import sys, halox
print(*sys.modules)
grid = halox.Grid((8, 8), halo=1, periodic=True, device="cpu")
u = grid.zeros()
grid.exchange(u)
assert grid.sum(u) == 0
print(*sys.modules)
"""


def test_modules_for_gpus_the_command_and_timelines_are_imported_for_them_only() -> None:
    command = [sys.executable, "-c", LOADED]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500)
    imported, used = (line.split() for line in run.stdout.splitlines())
    assert "halox.grid" in imported
    assert sum(in_package(name, "halox") for name in imported) <= MOST_MODULES
    assert "halox.reductions.host.host_reductions" in used
    assert not [
        name for name in used if name.startswith((*FOR_GPUS, "halox.cli", "halox.timeline"))
    ]
