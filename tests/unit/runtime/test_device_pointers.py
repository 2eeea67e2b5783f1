"""Whether MPI supports device pointers: a child process, which may crash, hang or lie, answers; a file caches it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halox.runtime import device_pointers
from halox.runtime.device_pointers import Verdict, ask_child, asked_before, environment
from halox.runtime.device_pointers_probe import SIZES, YES, why_wrong
from tests.support import becomes, require

require("mpi")
from mpi4py import MPI  # noqa: E402


def child(text: str) -> list[str]:
    return [sys.executable, "-c", text]


CHILDREN = {
    "yes": (f"print('a banner'); print({YES!r})", True, "succeeded"),
    "crash": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", False, "SIGSEGV"),
    "abort after yes": (f"import os; print({YES!r}, flush=True); os.abort()", False, "SIGABRT"),
    "silent success": ("pass", False, "status 0"),
}


@pytest.mark.parametrize("name", CHILDREN)
def test_children(name: str) -> None:
    text, takes, reason = CHILDREN[name]
    found = ask_child(0, child(text), limit_s=200)
    assert (found.takes, reason in found.reason, found.lasting) == (takes, True, True), found


def test_a_child_that_hangs_is_ended_with_all_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    text = (
        "import subprocess, time\n"
        "p = subprocess.Popen(['sleep', '900'])\n"
        f"open({str(pid)!r}, 'w').write(str(p.pid))\n"
        "time.sleep(900)"
    )
    found = ask_child(0, child(text), limit_s=5)
    assert not found.takes and "did not end within 5 s" in found.reason and not found.lasting
    state = Path(f"/proc/{pid.read_text()}/stat")
    assert becomes(lambda: not state.exists() or state.read_text().split()[2] == "Z")


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
    of_the_job = (
        "OMPI_COMM_WORLD_RANK",
        "PMIX_RANK",
        "PMI_RANK",
        "SLURM_JOB_ID",
        "HYDI_CONTROL_FD",
    )
    kept = {"OMPI_MCA_pml": "ucx", "UCX_TLS": "cuda", "CUDA_VISIBLE_DEVICES": "1", "PATH": "/bin"}
    found = environment({**dict.fromkeys(of_the_job, "1"), **kept, "PYTHONPATH": "/mine"})
    root = str(Path(device_pointers.__file__).resolve().parents[2])
    assert found == kept | {"PYTHONPATH": os.pathsep.join([root, "/mine"])}


def test_an_answer_is_kept_for_its_set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    reports: list[int | None] = [1]
    monkeypatch.setattr(device_pointers, "_query_library", lambda: reports[-1])

    def asked(key: str, verdict: Verdict) -> tuple[bool, bool]:
        """Return the answer, and whether a child gave it."""
        times: list[int] = []
        found = asked_before(0, ask=lambda _: times.append(1) or verdict, key=key)
        assert times or verdict.reason in found.reason or not reports[-1]
        return found.takes, bool(times)

    no, yes = Verdict(False, "so it was"), Verdict(True, "so it was")
    assert [asked("a", no), asked("a", no), asked("b", yes), asked("b", yes)] == [
        (False, True),
        (False, False),
        (True, True),
        (True, False),
    ]
    hasty = Verdict(False, "too slow", lasting=False)
    assert [asked("c", hasty), asked("c", hasty)] == [(False, True)] * 2
    file = tmp_path / "halox" / "device_pointers.json"
    file.write_text('{"b": {"takes": "yes"}}')
    assert [asked("b", yes), asked("b", yes)] == [(True, True), (True, False)]
    reports.append(0)
    assert asked("b", yes) == (False, False), "a library that denies it is believed"
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("a file where the folder should be")
    reports.append(None)
    assert [asked("a", yes), asked("a", yes)] == [(True, True)] * 2


def test_this_library_is_queried() -> None:
    """Open MPI has a query function, MPICH may have one; the answer depends on how the library was built."""
    is_open_mpi = MPI.get_vendor()[0] == "Open MPI"
    assert device_pointers._query_library() in ((0, 1) if is_open_mpi else (None, 0, 1))


@pytest.mark.parametrize(("text", "takes"), [("0", False), ("1", True), ("", None)])
def test_the_user_decides(text: str, takes: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALOX_CUDA_AWARE", text)
    found = device_pointers.decided_by_user()
    assert (found and found.takes) is takes
