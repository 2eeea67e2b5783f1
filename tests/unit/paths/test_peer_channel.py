"""The end of a channel of the peer path: its stream and its memory are released in the right order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from halox.paths import stream_channel
from halox.paths.base import Job
from halox.paths.peer import channel as peer
from halox.runtime.gpu import pools
from halox.runtime.gpu.pools import FailureWord


class Agreed:
    """A completed negotiation; its launches are recorded in ``log``."""

    def __init__(self, log: list[str]) -> None:
        self.world = SimpleNamespace(rank=0, limit_s=1.0)
        self.device, self.log = 0, log
        self.job = Job([], (), ())
        self.failure = FailureWord(0)

    is_movable = True

    def prepared(self) -> Any:
        launch = SimpleNamespace(launch=lambda stream: self.log.append("launched"))
        return SimpleNamespace(alone=launch, concurrent=launch, before=[], after=[])

    def error(self) -> Exception:
        number, exchange = self.failure.words[:2]
        return RuntimeError(f"message {number} has not come in exchange {exchange}")

    def abandon(self) -> None:
        self.log.append("memory given back")


def stream_of(log: list[str]) -> Any:
    return SimpleNamespace(ptr=7, synchronize=lambda: log.append("waited for the stream"))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    runtime = SimpleNamespace(eventRecord=lambda *_: None, streamWaitEvent=lambda *_: None)
    cuda = SimpleNamespace(runtime=runtime, get_current_stream=lambda: stream_of(said))
    event = SimpleNamespace(ptr=3)
    side = SimpleNamespace(stream=stream_of(said), before=event, after=event)
    streams = SimpleNamespace(
        acquire=lambda device: side, release=lambda device, item: said.append("stream given back")
    )
    monkeypatch.setattr(stream_channel, "cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(pools, "SIDE_STREAMS", streams)
    word = SimpleNamespace(array=np.zeros(8, "u1"), device_pointer=0)
    words = SimpleNamespace(acquire=lambda device: word, release=lambda device, item: None)
    monkeypatch.setattr("halox.runtime.gpu.pools.HOST_WORDS", words)
    monkeypatch.setattr("halox.runtime.gpu.streams.is_capturing", lambda stream: False)
    return said


@pytest.mark.parametrize("is_finished", [False, True])
def test_memory_is_given_back_last(is_finished: bool, log: list[str]) -> None:
    """`close` waits for the kernel, which ends at the time limit at the latest, and returns the stream.

    The memory is released later, by `free`, since peers may still write to it.
    """
    channel = peer.PeerChannel(Agreed(log))  # type: ignore[arg-type]
    channel.start()
    if is_finished:
        channel.finish()
    channel.close()
    assert log == ["launched", "waited for the stream", "stream given back"]
    assert channel.has_ended and not channel.has_failed
    channel.free()
    assert log[3:] == ["memory given back"]


def test_a_failure_nobody_was_told_of(log: list[str]) -> None:
    """`close` warns of the failure and sets ``has_failed``, so that the plan keeps arrays that a peer may write to."""
    agreed = Agreed(log)
    channel = peer.PeerChannel(agreed)  # type: ignore[arg-type]
    channel.run()
    before = pools.count_failures()
    agreed.failure.words[0], agreed.failure.words[1] = 1, 5
    assert pools.count_failures() == before + 1
    with pytest.warns(UserWarning, match="message 1 has not come in exchange 5"):
        channel.close()
    assert channel.has_failed and "memory given back" not in log
    assert pools.count_failures() == before
