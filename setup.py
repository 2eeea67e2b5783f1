"""The package list; everything else is declared in pyproject.toml.

The mini-apps lie in ``apps/`` beside the library and are installed as ``halox_apps``, a name that
cannot clash with anybody's own ``apps``; the benchmarks in ``asv_bench/halox_bench`` are installed
as ``halox_bench``. Such renamed trees cannot be discovered from pyproject.toml.
"""

from setuptools import find_namespace_packages, setup

setup(
    packages=[
        # Folders of kernels have no __init__; to packaging they are namespaces, with data in them.
        *find_namespace_packages(include=["halox", "halox.*"]),
        "halox_apps",
        *(f"halox_apps.{name}" for name in find_namespace_packages("apps")),
        *find_namespace_packages("asv_bench", include=["halox_bench", "halox_bench.*"]),
    ],
    package_dir={"halox_apps": "apps", "halox_bench": "asv_bench/halox_bench"},
)
