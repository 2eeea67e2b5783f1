"""Whether MPI supports device pointers: a child process, which may crash, hang or lie, answers; a file caches it."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halox.errors import HaloxError
from halox.runtime import device_pointers
from halox.runtime.device_pointers import Verdict, ask_child, asked_before, environment
from halox.runtime.device_pointers_probe import SIZES, YES, why_wrong
from tests.support import require

require("mpi")
from mpi4py import MPI  # noqa: E402


def child(text: str) -> list[str]:
    return [sys.executable, "-c", text]


CHILDREN = {
    "yes": (f"print('a banner'); print({YES!r})", True, "succeeded"),
    "crash": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", False, "SIGSEGV"),
    "abort after yes": (f"import os; print({YES!r}, flush=True); os.abort()", False, "SIGABRT"),
    "exit": ("raise SystemExit('no such device')", False, "status 1: no such device"),
    "silent success": ("pass", False, "status 0"),
    "boast": ("print('this MPI is CUDA-aware')", False, "CUDA-aware"),
}


@pytest.mark.parametrize("name", CHILDREN)
def test_children(name: str) -> None:
    text, takes, reason = CHILDREN[name]
    found = ask_child(0, child(text), limit_s=200)
    assert (found.takes, reason in found.reason, found.lasting) == (takes, True, True), found


def test_a_child_that_hangs_is_ended_with_all_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    text = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(900)'])\n"
        f"open({str(pid)!r}, 'w').write(str(p.pid))\n"
        "time.sleep(900)"
    )
    start = time.monotonic()
    found = ask_child(0, child(text), limit_s=5)
    assert time.monotonic() - start < 450
    assert not found.takes and "did not end within 5 s" in found.reason
    assert not found.lasting, "a limit shorter than usual says nothing for the next job"
    state = Path(f"/proc/{pid.read_text()}/stat")
    for _ in range(2000):
        if not state.exists() or state.read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("the child's child is still alive")


def test_a_child_that_cannot_be_started() -> None:
    found = ask_child(0, ["/no/such/program"])
    assert not found.takes and "could not be started" in found.reason and not found.lasting


def test_the_probe_itself_says_no_where_there_is_no_gpu() -> None:
    """Run the real child process, with this machine's MPI."""
    from halox.runtime.gpu.cuda import why_no_gpu

    found = ask_child(0 if why_no_gpu() else 99)
    assert not found.takes and "failed with status" in found.reason, found


class HostMemory:
    """Takes the place of device memory; any MPI supports host memory."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def allocate(self, nbytes: int) -> Any:
        array = np.zeros(nbytes, np.uint8)
        self.kept.append(array)
        return type("Memory", (), {"ptr": array.ctypes.data})()

    def write(self, pointer: int, content: np.ndarray) -> None:
        np.frombuffer(MPI.memory.fromaddress(pointer, content.size), np.uint8)[...] = content

    def read(self, pointer: int, nbytes: int) -> np.ndarray:
        return np.frombuffer(MPI.memory.fromaddress(pointer, nbytes), np.uint8).copy()


class LyingComm:
    """Sends with MPI, then changes a byte in the target or behind it."""

    def __init__(self, size: int, at: int) -> None:
        self.size, self.at = size, at

    def Sendrecv(self, source: Any, dest: int, tag: int, target: Any, *rest: int) -> None:
        MPI.COMM_SELF.Sendrecv(source, dest, tag, target, *rest)
        if len(target) == self.size:
            address = np.frombuffer(target, np.uint8).ctypes.data
            spoilt = np.frombuffer(MPI.memory.fromaddress(address, self.size + 8), np.uint8)
            spoilt[self.at] ^= 1


class IdleComm:
    """Accepts every call and sends nothing."""

    def Sendrecv(self, *_: Any) -> None:
        pass


def test_bytes_are_looked_at() -> None:
    span = MPI.memory.fromaddress
    assert why_wrong(MPI.COMM_SELF, span, HostMemory()) is None
    assert "of 8 bytes arrived" in str(why_wrong(IdleComm(), span, HostMemory()))
    for size in SIZES:
        for at in (0, size - 1):
            wrong = str(why_wrong(LyingComm(size, at), span, HostMemory()))
            assert wrong == f"a message of {size} bytes arrived with other bytes"
        wrong = str(why_wrong(LyingComm(size, size), span, HostMemory()))
        assert wrong == f"a message of {size} bytes wrote more than that"


def test_the_child_is_no_rank_of_the_job() -> None:
    found = environment(
        {
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_MCA_ess": "pmi",
            "OMPI_MCA_pml": "ucx",
            "OMPI_MCA_orte_hnp_uri": "x",
            "PMIX_RANK": "1",
            "PMI_RANK": "0",
            "PMI2_JOBID": "3",
            "PRTE_LAUNCHED": "1",
            "SLURM_JOB_ID": "7",
            "HYDI_CONTROL_FD": "4",
            "PALS_RANKID": "0",
            "UCX_TLS": "cuda",
            "MPICH_GPU_SUPPORT_ENABLED": "1",
            "CUDA_VISIBLE_DEVICES": "1",
            "PATH": "/bin",
            "PYTHONPATH": "/mine",
        }
    )
    root = str(Path(device_pointers.__file__).resolve().parents[2])
    assert found == {
        "OMPI_MCA_pml": "ucx",
        "UCX_TLS": "cuda",
        "MPICH_GPU_SUPPORT_ENABLED": "1",
        "CUDA_VISIBLE_DEVICES": "1",
        "PATH": "/bin",
        "PYTHONPATH": os.pathsep.join([root, "/mine"]),
    }


class Asked:
    def __init__(self, verdict: Verdict) -> None:
        self.verdict, self.times = verdict, 0

    def __call__(self, device: int) -> Verdict:
        self.times += 1
        return self.verdict


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # The child process decides, whatever this machine's MPI reports about itself.
    monkeypatch.setattr(device_pointers, "_query_library", lambda: 1)
    return tmp_path / "halox" / "device_pointers.json"


@pytest.mark.parametrize("takes", [True, False])
def test_an_answer_is_kept_for_its_set_up(takes: bool, cache: Path) -> None:
    ask = Asked(Verdict(takes, "so it was"))
    assert asked_before(0, ask=ask, key="a") == ask.verdict
    found = asked_before(0, ask=ask, key="a")
    assert found.takes == takes and "so it was" in found.reason and "earlier job" in found.reason
    assert ask.times == 1
    asked_before(0, ask=ask, key="b")
    assert ask.times == 2 and set(json.loads(cache.read_text())) == {"a", "b"}
    assert [*cache.parent.iterdir()] == [cache], "nothing is left lying about"


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": 3}', '{"a": {"takes": "yes"}}'])
def test_a_corrupt_file_counts_as_empty(content: str, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text(content)
    ask = Asked(Verdict(True, "asked"))
    assert asked_before(0, ask=ask, key="a").reason == "asked"
    assert asked_before(0, ask=ask, key="a").takes and ask.times == 1


def test_what_cannot_be_kept_is_asked_again(cache: Path) -> None:
    cache.parent.parent.joinpath("halox").write_text("a file where the folder should be")
    ask = Asked(Verdict(True, "asked"))
    assert [asked_before(0, ask=ask, key="a").takes for _ in range(2)] == [True, True]
    assert ask.times == 2
    hasty = Asked(Verdict(False, "too slow", lasting=False))
    cache.parent.unlink()
    assert [asked_before(0, ask=hasty, key="a").takes for _ in range(2)] == [False, False]
    assert hasty.times == 2 and not cache.exists()


def test_a_library_that_denies_it_is_believed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Asked(Verdict(True, "asked"))
    monkeypatch.setattr(device_pointers, "_query_library", lambda: 0)
    found = asked_before(0, ask=ask, key="a")
    assert not found.takes and "MPIX_Query_cuda_support" in found.reason and not ask.times
    monkeypatch.setattr(device_pointers, "_query_library", lambda: None)
    assert asked_before(0, ask=ask, key="a").takes and ask.times == 1


def test_this_library_is_queried() -> None:
    """Open MPI has a query function, MPICH may have one; the answer depends on how the library was built."""
    if MPI.get_vendor()[0] == "Open MPI":
        assert device_pointers._query_library() in (0, 1)
    else:
        assert device_pointers._query_library() in (None, 0, 1)


@pytest.mark.parametrize(("text", "takes"), [("0", False), ("1", True), ("", None)])
def test_the_user_decides(text: str, takes: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALOX_CUDA_AWARE", text)
    found = device_pointers.decided_by_user()
    assert (found and found.takes) is takes


def test_anything_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALOX_CUDA_AWARE", "yes")
    with pytest.raises(HaloxError, match="HALOX_CUDA_AWARE='yes': expected 1"):
        device_pointers.decided_by_user()
