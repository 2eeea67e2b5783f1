"""Examples of the documentation run, and public names are documented."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import halox
from tests import support

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in ("halox", "apps")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ">>> " in path.read_text()
]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def snippets(page: Path) -> str:
    return "\n".join(FENCE.findall(page.read_text()))


@pytest.mark.parametrize("page", [p for p in PAGES if snippets(p)], ids=lambda p: p.stem)
def test_snippets_run(page: Path) -> None:
    # The snippets of a page form one program, from top to bottom.
    support.require("mpi")
    exec(compile(snippets(page), str(page), "exec"), {"__name__": page.stem})


def test_a_notebook_on_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cells of docs/recipes/jupyter.md, where ipyparallel is installed."""
    pytest.importorskip("ipyparallel")
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
    page = (ROOT / "docs" / "recipes" / "jupyter.md").read_text()
    start, cell = re.findall(r"^```\{code-block\} \w+\n:name: \w+\n\n(.*?)^```$", page, re.S | re.M)
    notebook: dict[str, Any] = {}
    exec(start, notebook)
    try:
        notebook["engines"][:].execute(cell.removeprefix("%%px\n"), block=True)
        assert notebook["engines"][:]["total"] == [64 * 48] * 2
    finally:
        notebook["cluster"].stop_cluster_sync()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
@pytest.mark.part(3)
def test_examples_run(example: Path) -> None:
    """As they stand; tests/mpi/test_examples.py runs small cases of all of them."""
    support.require("mpi")
    if example.stem == "convolution":
        pytest.importorskip("torch")
    # Larger errors: a scheme of first order, a truncated series, and a rate fitted to few periods.
    most = {"shallow_water": 0.02, "taylor_green_3d": 1e-7, "pic": 0.02}
    assert runpy.run_path(str(example))["main"]() < most.get(example.stem, 1e-12)


@pytest.mark.full
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_examples_run_on_ranks(example: Path) -> None:
    """As their pages say; tests/mpi/test_examples.py runs small cases of them."""
    if example.stem == "convolution":
        pytest.importorskip("torch")
    ended = support.on_ranks(3, str(example))
    assert ended.returncode == 0, ended.stderr
    assert "3 rank(s)" in ended.stdout


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings_run(module: str) -> None:
    support.require("mpi")
    outcome = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert outcome.failed == 0


def test_the_tables_of_the_reference_list_every_public_name_once() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    blocks = re.findall(r"^\.\. autosummary::\n((?:   .*\n|\n)+)", page, re.MULTILINE)
    listed = [
        name for block in blocks for name in re.findall(r"^   (\w[\w.]*)$", block, re.MULTILINE)
    ]
    listed += re.findall(r"^\.\. py:data:: (\w+)$", page, re.MULTILINE)
    assert sorted(name for name in listed if "." not in name) == sorted(halox.__all__)
    assert len(set(listed)) == len(listed)
    assert dir(halox) == sorted(halox.__all__)


@pytest.mark.parametrize("module", ["halox", "halox.datatypes", "halox.errors"])
def test_every_public_name_has_a_docstring(module: str) -> None:
    found = sys.modules[module]
    names = getattr(found, "__all__", [n for n in vars(found) if n.endswith("Error")])
    for name in names:
        value = getattr(found, name)
        if not (inspect.isclass(value) or inspect.isroutine(value)):
            continue
        assert value.__doc__, f"{module}.{name}"
        if not inspect.isclass(value):
            continue
        for key, member in inspect.getmembers(value):
            if not key.startswith("_") and (callable(member) or isinstance(member, property)):
                assert inspect.getdoc(member), f"{module}.{name}.{key}"


def test_links_lead_to_pages_and_headings_that_exist() -> None:
    def letters(text: str) -> str:
        return re.sub(r"[\W_]", "", text).lower()

    link = re.compile(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)")
    headings = {
        page: {letters(line) for line in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)}
        for page in PAGES
    }
    found = []
    for page in PAGES:
        for target, anchor in link.findall(page.read_text()):
            there = (page.parent / target).resolve() if target else page
            exists = letters(anchor) in headings[there] if anchor else there.exists()
            found.append((page.relative_to(ROOT), target, anchor, exists))
    assert len(found) > 100 and not [one for one in found if not one[-1]]


@pytest.mark.full
def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    """The source is copied, since `make docs` writes into the folder and may run at the same time."""
    support.require("mpi")
    support.require("sphinx")
    copy = tmp_path / "copy"
    made = shutil.ignore_patterns("_build", "reference", "__pycache__")
    shutil.copytree(ROOT / "docs", copy / "docs", ignore=made)
    for path in ROOT.iterdir():
        if not (copy / path.name).exists() and not path.name.startswith("."):
            (copy / path.name).symlink_to(path)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "docs", "html"]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    ended = subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert (copy / "html" / "reference" / "halox.Grid.html").is_file()


def test_every_example_has_a_page_and_a_card() -> None:
    names = [example.stem for example in EXAMPLES]
    assert sorted(page.stem for page in (ROOT / "docs" / "examples").glob("*.md")) == names
    index = (ROOT / "docs" / "examples.md").read_text()
    assert not [name for name in names if f":link: examples/{name}.html" not in index]


def test_commands_of_the_readme_are_where_ci_looks() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in ("try", "test"):
        assert re.search(rf"^<!-- command: {name} -->\n```sh\n[^\n]+\n```$", readme, re.MULTILINE)
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
