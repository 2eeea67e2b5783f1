"""The mini-apps: beside the library in a checkout, else installed as ``halox_apps``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import halox
from halox.errors import MissingPackageError

PACKAGE = "halox_apps"

Progress = Callable[[str, int, int], None]
"""Called by an app as ``progress(what, done, total)``, from any rank, as often as it likes."""


@dataclass(frozen=True)
class App:
    """One mini-app as ``apps/__init__.py`` describes it."""

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Any, Progress], Mapping[str, Any] | None]


def checkout() -> Path | None:
    """Return the checkout that halox was imported from, or None if halox is installed."""
    root = Path(halox.__file__).resolve().parent.parent
    is_checkout = (root / "pyproject.toml").is_file() and (root / "apps" / "__init__.py").is_file()
    return root if is_checkout else None


def _package() -> ModuleType:
    """Import the package of apps that belongs to this very halox.

    A checkout comes first: its apps fit its library, an older wheel's may not.
    """
    if PACKAGE in sys.modules:
        return sys.modules[PACKAGE]
    root = checkout()
    if root is None:
        try:
            return importlib.import_module(PACKAGE)
        except ModuleNotFoundError as error:
            raise MissingPackageError(
                f"the mini-apps were not found: neither the package {PACKAGE!r} nor a folder "
                f"'apps' beside {Path(halox.__file__).parent}; install halox with pip, or put its "
                "checkout on PYTHONPATH"
            ) from error
    folder = root / "apps"
    spec = importlib.util.spec_from_file_location(
        PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise MissingPackageError(f"{folder} cannot be imported")
    package = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = package
    spec.loader.exec_module(package)
    return package


def names() -> list[str]:
    """Return the names of all apps, sorted; raise `MissingPackageError` if there is no package of apps."""
    return sorted(
        module.name for module in pkgutil.iter_modules(_package().__path__) if module.ispkg
    )


def load(name: str) -> App:
    """Import one app of `names`."""
    module = importlib.import_module(f"{_package().__name__}.{name}")
    return App(name, module.SUMMARY, module.add_arguments, module.run)
