"""Rules for imports: downward only, CuPy in few rooms, and public names in apps and examples."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

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
    [{"halox.dimension_names"}],
    [{"halox.domain"}],
    [{"halox.exchange"}, {"halox.collectives"}],
    [{"halox.gathering"}, {"halox.sampling"}, {"halox.linear_operators"}],
    [{"halox.checkpoint"}],
    [
        {
            "halox.grid",
            "halox.grid_reductions",
            "halox.xarray",
            "halox.coarsening",
            "halox.prediction",
        }
    ],
    [{"halox.transpose"}, {"halox.points"}, {"halox.cubed_sphere"}],
    [{"halox.fft"}],
    [{"halox"}],
    [{"halox.cli"}, {"halox.testing"}],
    [{"halox.__main__"}],
]
CUPY_ROOMS = ("halox.runtime", "halox.packing", "halox.paths", "halox.collectives.device")
PUBLIC = ("halox", "halox.datatypes", "halox.xarray")


def files_under(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def in_package(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def place(name: str) -> tuple[int, int]:
    """Return the floor of a module (or of a name in it), and the number of its room on that floor."""
    known = {
        module: (floor, number)
        for floor, rooms in enumerate(FLOORS)
        for number, room in enumerate(rooms)
        for module in room
    }
    longest = max((module for module in known if in_package(name, module)), key=len)
    if longest == "halox" and name != "halox":
        # A name in the package itself, as in `from halox import Grid`. Modules must have a room.
        path = ROOT / name.replace(".", "/")
        assert not path.exists() and not path.with_suffix(".py").exists(), f"{name} has no room"
    return known[longest]


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield all imports of a module, including imports in functions and for type checking."""
    for node in ast.walk(tree):
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


def imports_of(path: Path) -> list[tuple[int, str]]:
    tree = tree_of(path)
    return list(imports(tree, module_name(path), path.name == "__init__.py"))


def runs_at_import(path: Path) -> list[str]:
    """Return the names that importing a module imports; imports in functions do not count."""
    names = []
    pending: list[ast.AST] = [tree_of(path)]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
        pending.extend(ast.iter_child_nodes(node))
    return names


@pytest.mark.parametrize("path", files_under("halox"), ids=module_name)
def test_imports_go_downward(path: Path) -> None:
    importer = place(module_name(path))
    for line, name in imports_of(path):
        if in_package(name, "halox"):
            imported = place(name)
            assert imported[0] < importer[0] or (imported == importer and name != "halox"), (
                f"{path.relative_to(ROOT)}:{line}: floor {importer[0]} imports {name}, "
                f"floor {imported[0]}"
            )


@pytest.mark.parametrize("path", files_under("halox"), ids=module_name)
def test_cupy_stays_in_its_rooms_and_lazy(path: Path) -> None:
    importer = module_name(path)
    if not any(in_package(importer, room) for room in CUPY_ROOMS):
        used = [entry for entry in imports_of(path) if entry[1].startswith("cupy")]
        assert not used, f"{path.relative_to(ROOT)} imports CuPy: {used}"
    eager = [name for name in runs_at_import(path) if name.startswith(("cupy", "cuda"))]
    assert not eager, f"{path.relative_to(ROOT)} imports {eager} outside of a function"


@pytest.mark.parametrize("path", files_under("apps") + files_under("examples"), ids=module_name)
def test_apps_and_examples_use_public_names(path: Path) -> None:
    import halox
    import halox.datatypes

    allowed = {f"halox.{name}" for name in halox.__all__}
    allowed |= {f"halox.datatypes.{name}" for name in halox.datatypes.__all__}
    for line, name in imports_of(path):
        if in_package(name, "halox"):
            assert name in allowed or name in PUBLIC, f"{path.relative_to(ROOT)}:{line}: {name}"
        assert not name.startswith("cupy"), f"{path.relative_to(ROOT)}:{line}: use grid.xp"


# A kind of benchmark is one file; it imports the modules that all kinds share, and no other kind.
BENCHMARKS = "halox_bench"
KINDS_OF_BENCHMARKS = {
    *("allreduce", "calls", "checkpoint", "exchange", "fft", "messages", "pack", "reductions"),
    *("steps", "transpose"),
}


@pytest.mark.parametrize("path", files_under(f"asv_bench/{BENCHMARKS}"), ids=module_name)
def test_benchmarks_import_no_other_kind(path: Path) -> None:
    module = module_name(path).rpartition(".")[2]
    for line, name in imports_of(path):
        if in_package(name, BENCHMARKS) and module != "command":
            imported = name.split(".")[1]
            assert imported not in KINDS_OF_BENCHMARKS, f"{path.relative_to(ROOT)}:{line}: {name}"
    assert {one.stem for one in path.parent.glob("*.py")} >= KINDS_OF_BENCHMARKS


@pytest.mark.parametrize("folder", ["halox", "apps", "examples"])
def test_nothing_imports_the_benchmarks(folder: str) -> None:
    # The command line loads them by name, and only for a benchmark.
    users = {
        path.relative_to(ROOT).as_posix()
        for path in files_under(folder)
        if any(in_package(name, BENCHMARKS) for _, name in imports_of(path))
    }
    named = {
        path.relative_to(ROOT).as_posix()
        for path in files_under(folder)
        if BENCHMARKS in path.read_text(encoding="utf-8")
    }
    assert not users
    assert named == ({"halox/cli/catalogue.py"} if folder == "halox" else set())


OUTSIDE = {"_replace", "_SubParsersAction"}
"""Documented names of the standard library that begin with an underscore."""


def private_names(tree: ast.AST) -> list[str]:
    """Return the private attributes, and private names of other modules, that a module reaches for.

    The attributes of the module's own classes do not count.
    """
    own = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls")
    }
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    own |= {node.name for node in ast.walk(tree) if isinstance(node, definitions)}
    own |= {ast.unparse(node.target) for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)}
    reached = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr not in own | OUTSIDE:
            reached += [ast.unparse(node)] if is_private(node.attr) else []
        elif isinstance(node, ast.ImportFrom) and in_package(node.module or "", "halox"):
            reached += [alias.name for alias in node.names if is_private(alias.name)]
    return reached


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@pytest.mark.parametrize("path", files_under("halox"), ids=module_name)
def test_no_module_reaches_into_objects_of_others(path: Path) -> None:
    assert private_names(tree_of(path)) in ([], ["_version"])


def test_private_names_are_found() -> None:
    source = "from halox.grid import _Kept\nclass A:\n    def f(self, b):\n        return b._x + self._y + b._y\n"
    assert private_names(ast.parse(source)) == ["_Kept", "b._x"]


def test_datatypes_and_decomposition_need_no_mpi_to_import() -> None:
    for path in files_under("halox/datatypes") + files_under("halox/decomposition"):
        eager = [name for name in runs_at_import(path) if in_package(name, "mpi4py")]
        assert not eager, f"{path.relative_to(ROOT)} imports mpi4py outside of a function"


def test_the_checks_see_what_they_look_for() -> None:
    source = "from ..grid import Grid\ndef f():\n    import cupy.cuda\nimport halox.packing as p\n"
    found = [name for _, name in imports(ast.parse(source), "halox.packing.pack", False)]
    assert found == ["halox.grid.Grid", "halox.packing", "cupy.cuda"]
    errors, world, pack = "halox.errors.HaloxError", "halox.runtime.world", "halox.packing.pack"
    assert place(errors) < place(world) < place(pack)
    assert place("halox.grid.Grid") < place("halox.fft") < place("halox.Grid") == place("halox")
    with pytest.raises(AssertionError, match="has no room"):
        place("halox.__init__")


MOST_MODULES = 80
"""Largest number of modules of halox that ``import halox`` may load."""

FOR_GPUS = (
    "halox.runtime.gpu",
    "halox.runtime.device",
    "halox.collectives.device",
    "halox.packing.device",
)
"""Beginnings of the names of modules for GPUs."""

LOADED = """
import sys, halox
print(*[name for name in sys.modules if name.partition(".")[0] == "halox"])
grid = halox.Grid((8, 8), halo=1, periodic=True, device="cpu")
u = grid.zeros()
grid.exchange(u)
assert grid.sum(u) == 0
print(*[name for name in sys.modules if name.partition(".")[0] == "halox"])
"""


def test_modules_for_gpus_are_imported_for_gpus_only() -> None:
    command = [sys.executable, "-c", LOADED]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500)
    imported, used = (line.split() for line in run.stdout.splitlines())
    assert "halox.grid" in imported and len(imported) <= MOST_MODULES
    assert "halox.collectives.host.host_fields" in used
    # These two find out whether there is a GPU.
    found = {name for name in used if name.startswith(FOR_GPUS)} - {"halox.runtime.gpu"}
    assert found == {"halox.runtime.gpu.cuda", "halox.runtime.gpu.devices"}


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the cycles of a graph: one for each edge that closes a cycle in a depth-first search."""
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> None:
        if node in path:
            found.append([*path[path.index(node) :], node])
        elif node not in done:
            for following in sorted(graph.get(node, ())):
                visit(following, [*path, node])
            done.add(node)

    for node in sorted(graph):
        visit(node, [])
    return found


def graph_of(folder: str) -> dict[str, set[str]]:
    """Return, for each module of a folder, the modules of the folder that it imports, also in functions."""
    modules = {module_name(path): path for path in files_under(folder)}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = {name for _, name in imports_of(path)}
        wanted = {name if name in modules else name.rpartition(".")[0] for name in names}
        graph[module] = wanted & set(modules)
    return graph


@pytest.mark.parametrize("folder", ["halox/datatypes", "halox/decomposition", "halox/packing"])
def test_no_import_cycles_in_a_room(folder: str) -> None:
    assert cycles(graph_of(folder)) == []


def test_cycles_are_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c", "a"]]
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
