"""The page of environment variables names exactly the variables that the sources read."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "environment.md"
FOLDERS = ("halox", "apps", "asv_bench", "examples", "tests", "tools")
NAME = re.compile(r"HALOX_[A-Z_]+")
ROW = re.compile(r"^\| (`HALOX_[^|]+) \|.* \| ([^|]+) \|$", re.MULTILINE)


def texts(path: Path) -> set[str]:
    """Return the string constants of a source; every variable that it reads is among them."""
    source = path.read_text()
    nodes = ast.walk(ast.parse(source)) if "HALOX_" in source else ()
    return {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def rows() -> list[tuple[str, list[str]]]:
    """Return the names on the page, each with the files that read it."""
    found = []
    for names, files in ROW.findall(PAGE.read_text()):
        found += [(name, re.findall(r"`([^`]+)`", files)) for name in NAME.findall(names)]
    return found


def test_every_variable_is_on_the_page_and_no_other() -> None:
    sources = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    read = {text for path in sources for text in texts(path) if NAME.fullmatch(text)}
    assert sorted(name for name, _ in rows()) == sorted(read)


def test_they_are_read_where_the_page_says() -> None:
    read = {file: texts(ROOT / file) for _, files in rows() for file in files}
    assert not [name for name, files in rows() if not any(name in read[file] for file in files)]


def test_other_pages_name_variables_of_the_page_only() -> None:
    names = {name for name, _ in rows()}
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        unknown = set(NAME.findall(page.read_text())) - names
        assert not unknown, f"{page.relative_to(ROOT)}: {unknown}"
