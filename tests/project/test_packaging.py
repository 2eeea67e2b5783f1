"""The distribution contains every module and every kernel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

import halox
from halox_bench.command import KINDS
from tests.support import require

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("folder", ["halox", "apps", "asv_bench/halox_bench"])
def test_every_folder_of_modules_is_a_package(folder: str) -> None:
    # A folder without __init__.py can be imported from a checkout, but a wheel lacks it.
    for path in (ROOT / folder).rglob("*.py"):
        assert (path.parent / "__init__.py").is_file(), path.parent.relative_to(ROOT)


@pytest.mark.parametrize("folder", ["halox", "apps", "asv_bench/halox_bench"])
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


def test_the_oldest_versions_are_those_that_are_tested() -> None:
    """oldest.txt pins the requirements of the project and its extras without MPI and CUDA, and pytest and plugins."""
    tests = [line for line in PROJECT["dependency-groups"]["test"] if isinstance(line, str)]
    asked = {line for line in tests if line.startswith("pytest")}
    asked.update(PROJECT["project"]["dependencies"])
    for extra in ("xarray", "io", "fft", "plot", "view"):
        lines = PROJECT["project"]["optional-dependencies"][extra]
        assert set(lines) <= set(tests)
        asked.update(lines)
    pins = (ROOT / "tests" / "oldest.txt").read_text().splitlines()
    assert {line.replace(">=", "==") for line in asked} == {p for p in pins if p[0] != "#"}


def test_the_conda_recipe_agrees_with_the_project() -> None:
    yaml = pytest.importorskip("yaml")
    recipe = yaml.safe_load((ROOT / "tools" / "conda" / "recipe.yaml").read_text())
    project, requirements = PROJECT["project"], recipe["requirements"]
    assert recipe["package"]["name"] == project["name"]
    assert recipe["context"]["version"] == halox.__version__
    assert recipe["about"]["summary"] == project["description"]
    assert recipe["about"]["license"] == project["license"]
    scripts = [f"{name} = {target}" for name, target in project["scripts"].items()]
    assert recipe["build"]["python"]["entry_points"] == scripts

    def asked(*lines: str) -> set[str]:
        """Write requirements as conda does."""
        return {line.replace(">=", " >=") for line in lines}

    python = asked(f"python{project['requires-python']}")
    build = asked(*PROJECT["build-system"]["requires"])
    assert set(requirements["host"]) == python | build | {"pip"}
    assert set(requirements["run"]) == python | asked(*project["dependencies"]) | {"__linux"}
    extras = project["optional-dependencies"]
    optional = {line for name in ("xarray", "io", "fft", "plot", "view") for line in extras[name]}
    optional.add(extras["cuda12"][0])
    names = {"matplotlib": "matplotlib-base", "cupy-cuda12x": "cupy"}
    found = {
        f"{names.get(name, name)}>={version}"
        for name, version in (line.split(">=") for line in optional)
    }
    assert set(requirements["run_constraints"]) == asked(*found)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install a wheel in a fresh environment; returns the folder of its commands."""
    require("setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "wheel", *OFFLINE]
    subprocess.run([*pip, "-w", folder, _sources(folder)], check=True, timeout=500)
    (wheel,) = folder.glob("*.whl")
    return _environment(folder, wheel)


OFFLINE = ("--no-deps", "--no-index", "--no-build-isolation")


def _sources(folder: Path) -> Path:
    """Copy the files of the distribution."""
    sources = folder / "sources"
    sources.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("halox", "apps", "asv_bench", "src"):
        shutil.copytree(ROOT / name, sources / name, ignore=ignored, symlinks=True)
    return sources


def _environment(folder: Path, *what: str | Path) -> Path:
    """Install into a fresh environment; returns the folder of its commands."""
    environment = folder / "venv"
    # A .pth file adds this environment's packages as dependencies. Editable installs, which are .pth files themselves,
    # have no effect there.
    venv.create(environment, with_pip=False, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "--python", environment, "install", "--ignore-installed", *OFFLINE, *what],
        env=_without_path(),
        check=True,
        timeout=500,
    )
    return environment / "bin"


def _without_path() -> dict[str, str]:
    """Return the environment without PYTHONPATH, where pip would find this checkout as an installed package."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def installed_halox(commands: Path, *words: str) -> str:
    ended = subprocess.run(
        [commands / "halox", *words],
        cwd=commands,
        # The MPI library of this environment, if it is a wheel.
        env=_without_path()
        | {
            "LD_LIBRARY_PATH": f"{sys.prefix}/lib",
            "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.full
def test_a_wheel_brings_the_benchmarks(installed: Path) -> None:
    where = "import halox, halox_bench; print(halox.__file__, halox_bench.__file__)"
    found = subprocess.run(
        [installed / "python", "-I", "-c", where], capture_output=True, text=True, check=True
    ).stdout
    assert found.count(str(installed.parent)) == 2, "both from the wheel"
    assert "LAMMPS_full/3534-3062" in installed_halox(installed, "bench", "pack", "--list")
    words = ("--quick", "--device", "cpu", "--patterns", "NAS_LU_y/12")
    assert " selected " in installed_halox(installed, "bench", "pack", *words)
    for kind in KINDS:
        assert "usage: halox bench" in installed_halox(installed, "bench", kind, "--help")


@pytest.mark.full
def test_a_wheel_runs_an_app_on_two_ranks(installed: Path) -> None:
    require("mpi")
    words = "run stencil2d -n 2 --passes 1 --custom-size 64,64 --num-iters 10 --device cpu"
    assert "verified: yes" in installed_halox(installed, *words.split())


@pytest.mark.full
def test_type_checkers_see_an_editable_install(tmp_path: Path) -> None:
    """From another folder; mypy and pyright read folders in .pth files, and run no import hooks."""
    require("setuptools")
    commands = _environment(tmp_path, "-e", _sources(tmp_path))
    (tmp_path / "user.py").write_text("import halox\n\nhalox.Grid((8, 6)).grid_shape.x\n")
    mypy = [sys.executable, "-m", "mypy", "--python-executable", commands / "python", "user.py"]
    found = subprocess.run(
        mypy, cwd=tmp_path, env=_without_path(), capture_output=True, text=True, check=False
    )
    assert '"tuple[int, ...]" has no attribute "x"' in found.stdout, found.stdout + found.stderr
    where = "import halox, halox_apps, halox_bench; print(halox.__path__, halox_bench.__path__)"
    here = subprocess.run([commands / "python", "-I", "-c", where], capture_output=True, text=True)
    assert here.stdout.count(str(tmp_path / "sources")) == 2


@pytest.mark.full
def test_a_wheel_brings_the_kernels(installed: Path) -> None:
    (packages,) = installed.parent.glob("lib/python*/site-packages")
    for folder, name in (("halox", "halox"), ("asv_bench/halox_bench", "halox_bench")):
        here = {p.relative_to(ROOT / folder) for p in (ROOT / folder).rglob("*.cu")}
        there = {p.relative_to(packages / name) for p in (packages / name).rglob("*.cu")}
        assert here == there and here
