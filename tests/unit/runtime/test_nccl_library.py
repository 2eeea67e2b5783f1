"""The binding of NCCL, on a stand-in library that records its calls, and the watch of exchanges for timeouts."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from halox.errors import DeviceError, ExchangeTimeoutError
from halox.runtime import nccl_ranks
from halox.runtime.gpu import nccl, pools
from halox.runtime.gpu.nccl import Nccl, NcclOp
from tests.fakes.cpu_kernels import shared_library
from tests.fakes.fake_cupy import pinned
from tests.fakes.host_launches import leave
from tests.fakes.lone_rank import nccl_of_one
from tests.support import require

require("cxx")

CODE = r"""
#include <cstdio>
#include <cstring>
#include <string>
struct Id { char internal[128]; };
static std::string told;
static int failing = 0, number = 22907, asynchronous = 0;
static int say(const char *text) { told += text; told += '\n'; return 0; }
extern "C" {
const char *calls() { return told.c_str(); }
void set(int fails, int version, int later) { told = ""; failing = fails; number = version; asynchronous = later; }
int ncclGetVersion(int *v) { *v = number; return 0; }
const char *ncclGetErrorString(int code) { return code == 5 ? "invalid usage" : "other error"; }
const char *ncclGetLastError(void *) { return "the last words"; }
int ncclGetUniqueId(Id *id) { for (int i = 0; i < 128; i++) id->internal[i] = (char)(i + 100); return 0; }
int ncclCommInitRank(void **comm, int size, Id id, int rank) {
    char line[200];
    bool same = true;
    for (int i = 0; i < 128; i++) same = same && id.internal[i] == (char)(i + 100);
    snprintf(line, sizeof line, "init %d of %d %s", rank, size, same ? "same id" : "other id");
    *comm = (void *)0x700000000001;
    return failing ? failing : say(line);
}
int ncclCommAbort(void *comm) { return say(comm == (void *)0x700000000001 ? "abort" : "abort another"); }
int ncclCommGetAsyncError(void *, int *code) { *code = asynchronous; return 0; }
int ncclGroupStart() { return say("start"); }
int ncclGroupEnd() { say("end"); return failing; }
static int move(const char *what, void *p, size_t n, int type, int peer, void *comm, void *stream) {
    char line[200];
    snprintf(line, sizeof line, "%s %llx %llu type %d peer %d comm %llx stream %llx", what, (unsigned long long)p,
             (unsigned long long)n, type, peer, (unsigned long long)comm, (unsigned long long)stream);
    return say(line);
}
int ncclSend(void *p, size_t n, int t, int peer, void *c, void *s) { return move("send", p, n, t, peer, c, s); }
int ncclRecv(void *p, size_t n, int t, int peer, void *c, void *s) { return move("recv", p, n, t, peer, c, s); }
}
"""


@pytest.fixture
def library() -> Any:
    found = shared_library(CODE, "-O1")
    found.calls.restype = ctypes.c_char_p
    found.set(0, 22907, 0)
    return found


def test_calls(library: Any) -> None:
    made = Nccl(library)
    unique = made.unique_id()
    comm = made.make(3, unique, 2)
    ops = [NcclOp(True, 0x7F0000000010, 5 << 32, 1), NcclOp(False, 0x7F0000000020, 8, 0)]
    made.prepared(comm, ops)(0x7F00000000AA)
    made.abort(comm)
    assert (made.version, comm, len(unique)) == (22907, 0x700000000001, 128)
    ends = "comm 700000000001 stream 7f00000000aa"
    assert library.calls().decode().splitlines() == [
        "init 2 of 3 same id",
        "start",
        f"send 7f0000000010 {5 << 32} type 1 peer 1 {ends}",
        f"recv 7f0000000020 8 type 1 peer 0 {ends}",
        "end",
        "abort",
    ]


def test_errors(library: Any) -> None:
    made = Nccl(library)
    library.set(5, 22907, 0)
    with pytest.raises(DeviceError):
        made.make(2, bytes(128), 0)
    with pytest.raises(DeviceError):
        made.prepared(1, [])(0)
    assert made.failure(1) == ""
    for later, text in ((7, ""), (5, "invalid usage")):
        library.set(0, 22907, later)
        assert made.failure(1) == text


def test_too_old(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    library.set(0, 20906, 0)
    monkeypatch.setattr(nccl, "_loaded", lambda: library)
    nccl.load_nccl.cache_clear()
    with pytest.raises(DeviceError, match=r"NCCL 2\.9\.6 is too old"):
        nccl.load_nccl()
    nccl.load_nccl.cache_clear()


def test_an_abort_waits_for_the_thread_that_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The abort frees the communicator, which the watching thread may be querying."""
    asked, answers, aborted = threading.Event(), threading.Event(), threading.Event()
    is_early: list[bool] = []

    def failure(comm: int) -> str:
        asked.set()
        answers.wait(0.2)
        is_early.append(aborted.is_set())
        return ""

    ranks = nccl_of_one(monkeypatch, failure=failure, abort=lambda comm: aborted.set())
    watch: Any = SimpleNamespace(limit_s=1.0, poll=lambda: None)
    ranks.watch(watch)
    assert asked.wait(120)
    ranks.fail("for a test")
    answers.set()
    # If this thread was slow, the watching thread has looked more than once.
    assert aborted.wait(120) and is_early and not any(is_early)


class TestWatch:
    """A watch with a time limit of 10 seconds; the test writes the device's words and sets the clock."""

    @pytest.fixture(autouse=True)
    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pools, "HOST_WORDS", pools.Pool(lambda _: pinned(pools.WORDS_BYTES)))
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(nccl_ranks, "time", clock)
        self.now = 0.0
        self.ranks = ranks = SimpleNamespace(
            rank=0,
            device=0,
            failed="",
            watch=lambda watch: None,
            forget=lambda watch: None,
            fail=lambda why, kind: setattr(self.ranks, "failed", why),
        )
        self.name = np.array([7], "u4")
        self.names = np.array([self.name.ctypes.data] * 2, "u8")
        at = self.names.ctypes.data
        self.made = nccl_ranks.Watch(ranks, "an exchange", [1, 3], 7, at, [3, 1], 10.0)

    def follow(self, steps: list[Any]) -> None:
        """Leave marks as a GPU does, and look at the times that the steps name: does a look report a timeout?"""
        for step in steps:
            if step == "begin":
                leave(self.made.begin)
            elif step == "end":
                leave(self.made.end)
            else:
                self.now, is_late = step
                assert bool(self.made.poll()) == is_late, step

    def test_an_exchange_that_does_not_end(self) -> None:
        self.follow(["begin", (1, False), (10.9, False), (11.1, True)])
        text, kind = self.made.poll() or ("", None)
        assert "waited for ranks 1, 3" in text and "for 10 s" in text
        assert kind is ExchangeTimeoutError

    @pytest.mark.parametrize(
        "steps",
        [
            # One that ends late.
            ["begin", (1, False), (10, False), "end", (11, False), (50, False), (100, False)],
            # Every look finds a running exchange, but a new one each time; only the last one is too long.
            ["begin", (1, False), (9, False), "end", "begin", (11, False), (20, False), (22, True)],
            # The limit does not include pauses between exchanges.
            ["begin", "end", (100, False), "begin", (300, False), (309, False), (311, True)],
        ],
    )
    def test_exchanges_that_end(self, steps: list[Any]) -> None:
        self.follow(steps)
