"""The hook for uncaught exceptions, with a recording `MPI`; tests/faults/test_programs.py runs programs."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from halox.runtime import uncaught

Calls = list[tuple[Any, ...]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Install the hook after a hook of the user; return the calls of the user's hook and of MPI."""
    calls: Calls = []
    comm = SimpleNamespace(rank=1, size=3, Abort=lambda code: calls.append(("Abort", code)))
    mpi: Any = SimpleNamespace(COMM_WORLD=comm, Is_finalized=lambda: "finalized" in sys.argv)

    def hook(*error: Any) -> None:
        calls.append(error)
        if str(error[1]) == "the hook exits":
            sys.exit(0)

    monkeypatch.setattr(sys, "excepthook", hook)
    monkeypatch.setattr("atexit.register", lambda function: function)
    uncaught.end_together.__wrapped__(mpi)
    return calls


def test_all_ranks_end_after_the_hook_of_the_user(
    calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    error = ValueError("wrong")
    sys.excepthook(ValueError, error, None)
    assert calls == [(ValueError, error, None), ("Abort", 1)]
    assert capsys.readouterr().err == "halox: ValueError on rank 1 of 3; all ranks end\n"


def test_all_ranks_end_after_a_hook_that_fails(
    calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    error = ValueError("the hook exits")
    sys.excepthook(ValueError, error, None)
    assert calls == [(ValueError, error, None), ("Abort", 1)]
    assert capsys.readouterr().err.startswith("ValueError: the hook exits\nhalox: ")


@pytest.mark.parametrize("case", ["interactive", "finalized", "forked"])
def test_other_processes_continue(case: str, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    if case == "interactive":
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    elif case == "finalized":
        monkeypatch.setattr(sys, "argv", ["finalized"])
    else:
        monkeypatch.setattr(uncaught, "FORKED", [True])
    sys.excepthook(ValueError, ValueError(), None)
    assert [len(call) for call in calls] == [3]


def test_a_closed_pipe_does_not_matter(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", SimpleNamespace(flush=fail))
    with pytest.raises(BrokenPipeError):
        sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert calls[-1] == ("Abort", 130)
