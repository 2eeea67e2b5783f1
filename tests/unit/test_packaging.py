"""What packaging takes along: every module and every kernel must be among it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import halox

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("folder", ["halox", "apps"])
def test_every_folder_of_modules_is_a_package(folder: str) -> None:
    # A folder without __init__ can be imported from a checkout but is missing in a wheel.
    for path in (ROOT / folder).rglob("*.py"):
        assert (path.parent / "__init__.py").is_file(), path.parent.relative_to(ROOT)


@pytest.mark.parametrize("folder", ["halox", "apps"])
def test_every_other_file_is_package_data(folder: str) -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["*"]
    for path in (ROOT / folder).rglob("*"):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            assert any(path.match(pattern) for pattern in patterns), path.relative_to(ROOT)


def test_version_is_read_without_an_import() -> None:
    assert (
        PROJECT["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "halox._version.__version__"
    )
    assert halox.__version__.count(".") == 2
