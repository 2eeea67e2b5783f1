"""Whether MPI supports device pointers: a child process, which may crash or hang, answers; a file caches it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from halox.runtime import device_pointers
from halox.runtime.device_pointers import Verdict, ask_child, asked_before
from halox.runtime.device_pointers_probe import YES
from tests.support import require

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


def test_a_child_that_hangs_is_ended() -> None:
    found = ask_child(0, child("import time; time.sleep(900)"), limit_s=2)
    assert not found.takes and "did not end within 2 s" in found.reason and not found.lasting


def test_the_probe_itself_says_no_where_there_is_no_gpu() -> None:
    """Run the real child process, with this machine's MPI."""
    from halox.runtime.gpu.cuda import why_no_gpu

    found = ask_child(0 if why_no_gpu() else 99)
    assert not found.takes and "failed with status" in found.reason, found


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
