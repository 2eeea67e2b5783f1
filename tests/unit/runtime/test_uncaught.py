"""The hook for uncaught exceptions, with a recording `MPI`; tests/faults/test_programs.py runs programs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from halox.runtime.finalizing import FORKED
from halox.runtime.uncaught import end_together

Calls = list[tuple[Any, ...]]


@pytest.fixture
def hook_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return a function that returns halox's hook, installed after a hook of the user that exits."""
    monkeypatch.setattr("atexit.register", lambda function: function)
    before = sys.excepthook
    yield _hook_after
    sys.excepthook = before


def _hook_after(calls: Calls, finalized: bool = False) -> Any:
    comm = SimpleNamespace(rank=1, size=3, Abort=lambda code: calls.append(("Abort", code)))
    mpi: Any = SimpleNamespace(COMM_WORLD=comm, Is_finalized=lambda: finalized)

    def hook(*error: Any) -> None:
        calls.append(error)
        sys.exit(0)

    sys.excepthook = hook
    end_together.__wrapped__(mpi)
    return sys.excepthook


@pytest.mark.parametrize(("kind", "status"), [(ValueError, 1), (KeyboardInterrupt, 130)])
def test_all_ranks_end_after_a_hook_that_fails(
    hook_after: Any, kind: Any, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: Calls = []
    error = kind("the hook exits")
    hook_after(calls)(kind, error, None)
    assert calls == [(kind, error, None), ("Abort", status)]
    said = capsys.readouterr().err
    assert f"{kind.__name__}: the hook exits\nhalox: {kind.__name__} on rank 1 of 3" in said


@pytest.mark.parametrize("case", ["finalized", "forked", "interactive"])
def test_other_processes_continue(hook_after: Any, case: str) -> None:
    calls: Calls = []
    hook = hook_after(calls, finalized=case == "finalized")
    try:
        if case == "interactive":
            sys.ps1 = ">>> "
        elif case == "forked":
            FORKED.append(True)
        hook(ValueError, ValueError(), None)
    finally:
        FORKED.clear()
        vars(sys).pop("ps1", None)
    assert len(calls) == 1
