"""The package list; pyproject.toml declares everything else.

Two folders are installed under other names, which pyproject.toml cannot express: the mini-apps in
``apps/`` as ``halox_apps``, so that they do not clash with a user's own ``apps``, and the benchmarks
in ``asv_bench/halox_bench`` as ``halox_bench``.
"""

from setuptools import find_namespace_packages, setup

setup(
    packages=[
        # Folders of kernels have no __init__, so setuptools finds them only as namespace packages.
        *find_namespace_packages(include=["halox", "halox.*"]),
        "halox_apps",
        *(f"halox_apps.{name}" for name in find_namespace_packages("apps")),
        *find_namespace_packages("asv_bench", include=["halox_bench", "halox_bench.*"]),
    ],
    package_dir={"halox_apps": "apps", "halox_bench": "asv_bench/halox_bench"},
)
