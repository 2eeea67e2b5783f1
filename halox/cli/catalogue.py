"""Import of the mini-apps and the benchmarks, from a checkout or an installation.

In a checkout the packages are in the folders ``apps`` and ``asv_bench/halox_bench``, which are not on Python's path.
"""

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
from typing import TYPE_CHECKING

import halox
from halox.errors import MissingPackageError

if TYPE_CHECKING:
    from mpi4py import MPI

PACKAGE = "halox_apps"
BENCHMARKS = "halox_bench"

_FOLDERS = {PACKAGE: ("mini-apps", "apps"), BENCHMARKS: ("benchmarks", "asv_bench/halox_bench")}
"""Contents and checkout folder of each package."""

Progress = Callable[[str, int, int], None]
"""Called by an app as ``progress(what, done, total)``, on any rank, any number of times."""


@dataclass(frozen=True)
class App:
    """A mini-app, as described in ``apps/__init__.py``."""

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, MPI.Intracomm, Progress], Mapping[str, object] | None]
    picture: str | None = None
    """Contents of the picture that the app can return, None without a picture."""


def checkout() -> Path | None:
    """Return the checkout that halox was imported from, or None if halox is installed."""
    root = Path(halox.__file__).resolve().parent.parent
    is_checkout = (root / "pyproject.toml").is_file() and (root / "apps" / "__init__.py").is_file()
    return root if is_checkout else None


def package(name: str) -> ModuleType:
    """Import `PACKAGE` or `BENCHMARKS` for this halox; raise `MissingPackageError` if it is not found.

    A checkout has precedence: its apps fit its library, but apps of an older installed wheel may not.
    """
    if name in sys.modules:
        return sys.modules[name]
    what, place = _FOLDERS[name]
    root = checkout()
    if root is None:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise MissingPackageError(
                f"the {what} were not found: neither the package {name!r} nor a folder "
                f"{place!r} beside {Path(halox.__file__).parent}; install halox from its checkout "
                "with pip, or put the checkout on PYTHONPATH"
            ) from error
    folder = root / place
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None or not folder.is_dir():
        raise MissingPackageError(f"{folder} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def names() -> list[str]:
    """Return the sorted names of all apps; raise `MissingPackageError` if the package of apps is not found."""
    return sorted(
        module.name for module in pkgutil.iter_modules(package(PACKAGE).__path__) if module.ispkg
    )


def load(name: str) -> App:
    """Import one app of `names`."""
    module = importlib.import_module(f"{package(PACKAGE).__name__}.{name}")
    picture = getattr(module, "PICTURE", None)
    return App(name, module.SUMMARY, module.add_arguments, module.run, picture)
