"""Small faults put into halox one at a time: does a test of that room fail?

``python3 -m tools.mutate choose FILE --count 40 --seed 1`` writes random mutants of all rooms to a JSON file: a file, a
line, its text and the changed text. ``python3 -m tools.mutate run FILE`` applies each mutant that still fits the
sources, runs the tests of its room until one fails, restores the file, and records the test. Two versions of the test
suite are compared by the same mutants: no mutant that one version finds may be missed by the other.

Most tests on ranks run on three, where they have all their cases. Run it in a clone of its own: a mutant stands in
the sources while its tests run.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from halox.cli import launcher
from tests.launching import PYTEST, SETTINGS

ROOT = Path(__file__).resolve().parents[1]
HANG_S = 900.0
"""Time after which the tests of a mutant count as hanging, which finds the mutant."""

TESTS: dict[str, list[tuple[int, str]]] = {
    # The prefix of a file: ranks (0 for one process) and test files without their folder, the likeliest first.
    "halox/io/checkpoint": [(3, "checkpoints output")],
    "halox/cli": [(0, "cli view links tune")],
    "halox/reductions/device": [(3, "device_reductions"), (0, "allreduce_kernel allreduce_plan")],
    "halox/reductions": [
        (0, "expressions operations exact_sums"),
        (3, "allreduce statistics reproducible combined_values"),
    ],
    "halox/datatypes": [(0, "datatypes signature mpi_bridge")],
    "halox/decomposition": [
        (0, "fields procgrid partition"),
        (3, "grid boundaries folds exchange"),
    ],
    "halox/domain": [(3, "grid cartesian allocation stopping")],
    "halox/plans": [
        (0, "regions selection costs"),
        (3, "exchange boundaries typed"),
        (2, "loops"),
    ],
    "halox/fft": [(3, "fft"), (0, "fft_stages")],
    "halox/io": [(3, "gather scatter checkpoints")],
    "halox/packing": [
        (0, "packing/host packing/packers packing/host_against_mpi"),
        (0, "packing/strided_plan packing/traversal packing/workunits packing/blocking"),
        (0, "packing/copy_engine packing/tiles packing/strided"),
    ],
    "halox/paths": [
        (3, "exchange channels captures"),
        (0, "peer_kernel peer_channel packed_channels local"),
    ],
    "halox/runtime": [
        (0, "foreign_arrays segments"),
        (3, "agreement threads grid"),
        (2, "calls"),
    ],
    "halox/sampling": [(3, "points"), (0, "philox point_kernel random_kernel")],
    "halox/sampling/points.py": [(3, "points")],
    "halox/xarray.py": [(2, "xarray labels")],
    "halox/fft/transpose.py": [(3, "transpose")],
    "halox/grid": [(3, "grid statistics boundaries")],
    "halox/solvers": [(3, "solvers")],
    "halox/cubed_sphere.py": [(3, "cubed_sphere")],
    "halox/plans/prediction.py": [(3, "prediction")],
}

SWAPPED: dict[type[ast.AST], str] = {
    **{ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="},
    **{ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"},
    **{ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "+"},
    **{ast.And: "or", ast.Or: "and"},
}
"""The operator that takes the place of another."""


def mutants_of(file: Path) -> Iterator[dict[str, Any]]:
    """Every mutant of one file; messages of errors, annotations and docstrings are left alone."""
    lines = file.read_text().splitlines()
    tree = ast.parse(file.read_text())
    left_alone = {
        id(inner)
        for node in ast.walk(tree)
        for outer in _not_code(node)
        for inner in ast.walk(outer)
    }
    for node in ast.walk(tree):
        if id(node) in left_alone:
            continue
        for first, last, text in _changes(node, lines):
            line = lines[node.lineno - 1]  # type: ignore[attr-defined]
            changed = f"{line[:first]}{text}{line[last:]}"
            yield {
                "file": file.relative_to(ROOT).as_posix(),
                "line": node.lineno,  # type: ignore[attr-defined]
                "text": line,
                "changed": changed,
            }


def _not_code(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert):
        yield node
    if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
        yield node.annotation
    if isinstance(node, ast.FunctionDef) and node.returns is not None:
        yield node.returns
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        yield node


def _changes(node: ast.AST, lines: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Changes within the first line of a node, as first and last column and the new text."""
    if getattr(node, "lineno", 0) != getattr(node, "end_lineno", -1):
        return
    op: type[ast.AST]
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        sides, op = (node.left, node.comparators[0]), type(node.ops[0])
    elif isinstance(node, ast.BinOp):
        sides, op = (node.left, node.right), type(node.op)
    elif isinstance(node, ast.BoolOp):
        sides, op = (node.values[0], node.values[1]), type(node.op)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield node.col_offset, node.end_col_offset or 0, str(node.value + 1)
        return
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node.col_offset, node.end_col_offset or 0, "pass"
        return
    else:
        return
    new = SWAPPED.get(op)
    first, last = sides[0].end_col_offset or 0, sides[1].col_offset
    between = lines[node.lineno - 1][first:last]
    if new is not None and "(" not in between and ")" not in between:
        yield first, last, f" {new} "


def tests_of(file: str) -> list[tuple[int, str]]:
    """The tests of the room of a file: of the longest prefix in `TESTS`."""
    return TESTS[max((prefix for prefix in TESTS if file.startswith(prefix)), key=len)]


def choose(count: int, seed: int) -> list[dict[str, Any]]:
    """Choose mutants at random, from each prefix of `TESTS` in turn."""
    rng = random.Random(seed)
    rooms: dict[str, list[dict[str, Any]]] = {prefix: [] for prefix in TESTS}
    for file in sorted((ROOT / "halox").rglob("*.py")):
        name = file.relative_to(ROOT).as_posix()
        fitting = [prefix for prefix in TESTS if name.startswith(prefix)]
        if fitting:
            rooms[max(fitting, key=len)] += mutants_of(file)
    for found in rooms.values():
        rng.shuffle(found)
    return [rooms[prefix].pop() for k in range(count) for prefix in [list(TESTS)[k % len(TESTS)]]]


def run_one(mutant: dict[str, Any]) -> str:
    """Return the test that finds a mutant, "missed", or "gone" if its line is no longer there once."""
    path = ROOT / mutant["file"]
    before = path.read_text() if path.exists() else ""
    lines = before.splitlines()
    at = mutant["line"] - 1
    if at >= len(lines) or lines[at] != mutant["text"]:
        if lines.count(mutant["text"]) != 1:
            return "gone"
        at = lines.index(mutant["text"])
    lines[at] = mutant["changed"]
    try:
        path.write_text("\n".join(lines) + "\n")
        for ranks, files in tests_of(mutant["file"]):
            found = _failing(ranks, [_path(ranks, name) for name in files.split()])
            if found:
                return found
    finally:
        path.write_text(before)
    return "missed"


def _path(ranks: int, name: str) -> str:
    """Return the path of a test file, in any room: of tests/mpi if it runs on ranks."""
    room, _, file = name.rpartition("/")
    folder = ROOT / "tests" / ("mpi" if ranks else "unit")
    (found,) = folder.rglob(f"{room and room + '/'}test_{file}.py")
    return found.relative_to(ROOT).as_posix()


def _failing(ranks: int, files: Sequence[str]) -> str:
    """Return the first test that fails, empty if all pass."""
    command = [*PYTEST, "-x", "-p", "no:randomly", *files]
    environment = {**os.environ, **SETTINGS, "HALOX_TIMEOUT": "60"}
    if ranks:
        environment |= launcher.environment(ranks)
        command = launcher.command(launcher.find(), ranks, command)
    else:
        command = [sys.executable, *command]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG_S
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    if done.returncode == 0:
        return ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else f"exit status {done.returncode}: {done.stderr[-200:]}"


def main() -> None:
    """Choose mutants, or run them and write the outcome of each beside it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["choose", "run"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--key", default="found", help="name of the outcomes in the file")
    given = parser.parse_args()
    if given.what == "choose":
        given.file.write_text(json.dumps(choose(given.count, given.seed), indent=1) + "\n")
        return
    mutants = json.loads(given.file.read_text())
    for number, mutant in enumerate(mutants):
        if given.key in mutant:
            continue
        began = time.monotonic()
        mutant[given.key] = run_one(mutant)
        mutant[f"{given.key}_s"] = round(time.monotonic() - began, 1)
        given.file.write_text(json.dumps(mutants, indent=1) + "\n")
        print(number, mutant["file"], mutant["line"], mutant[given.key], flush=True)


if __name__ == "__main__":
    main()
