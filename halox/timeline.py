"""Timeline of a program with ``HALOX_TRACE=folder``: events of its calls, in a file a rank that Perfetto opens.

`install`, called when halox is imported with the variable, wraps `_CALLS`, exchanges, and their steps, which
`Channel.timeline` names; otherwise nothing is wrapped. Events are tuples until they are written, each second or after
`_MOST`. The file, of Chrome's trace event format, is complete JSON after each write: a killed rank lacks one second.

All ranks have one clock: CLOCK_MONOTONIC and its distance to UTC, which the ranks of a node measure alike; nodes differ
by the error of their clocks. Numbers of JSON hold times since `_ZERO_NS` to some ns, but not times since 1970.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache, partial, reduce
from importlib import import_module
from io import FileIO
from platform import node
from threading import RLock, get_ident
from time import monotonic_ns, time_ns
from typing import Any

from halox.plans.runner import Runner
from halox.runtime.communicator import Communicator
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.streams import is_capturing
from halox.runtime.world import World

_ZERO_NS = 1_767_225_600_000_000_000  # 2026-01-01 UTC
_MOST, _WRITE_NS = 4096, 10**9
# Module, class or "-" for functions of the module, and calls.
_CALLS = """
halox.reductions.grid_reductions GridReductions sum mean std min max norm dot reduce argmin argmax histogram allreduce
halox.reductions.allreduce Allreduce __call__
halox.grid Grid __init__ gather scatter save load
halox.io.checkpoint.output Output append wait close
halox.io.checkpoint.store Store wait
halox.fft.transform FFT forward backward
halox.sampling.points Points get add record collect
halox.plans.device_loop Loop __call__
halox.plans.making - make_plan
"""
_EXCHANGES = {"run": "", "start": " start", "start_copied": " start", "finish": " finish"}
_ARRIVING = ("wait", "copy", "unpack", "wait and unpack")

# The JSON that is known before a call, the attributes of its NVTX range, and whether it has work on a GPU.
Label = tuple[str, Any, bool]
Event = tuple[str, int, int, int]  # JSON of the label, thread or stream, begin and duration in ns


class _Streams:
    """Times of work on GPU streams: between two events, which are read once the work has ended."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Any, ...]] = deque()
        self._anchor: tuple[Any, int] | None = None  # an event, and its time on the host

    def begin(self) -> tuple[Any, ...] | None:
        """Begin on the current stream, unless it is captured."""
        cuda = cupy().cuda
        stream = cuda.get_current_stream()
        if is_capturing(stream):
            return None
        if self._anchor is None:
            idle = cuda.Stream(non_blocking=True)
            for _ in range(3):  # the first takes longer
                before, event = monotonic_ns(), idle.record()
                event.synchronize()
            self._anchor = event, (before + monotonic_ns()) // 2
        return self._anchor, stream, stream.record()

    def end(self, text: str, anchor: tuple[Any, int], stream: Any, first: Any) -> None:
        self._pending.append((text, anchor, stream.ptr, first, stream.record()))

    def ended(self) -> Iterator[Event]:
        while self._pending and not is_capturing() and self._pending[0][-1].done:
            text, (anchor, time), stream, first, last = self._pending.popleft()
            elapsed_ms = cupy().cuda.get_elapsed_time
            begin = time + round(1e6 * elapsed_ms(anchor, first))
            yield text, stream, begin, round(1e6 * elapsed_ms(first, last))
        self._anchor = None  # the clocks drift


class _Trace:
    def __init__(self, folder: str) -> None:
        self._folder, self._process, self._rank = folder, os.getpid(), -1
        self._file: FileIO | None = None
        self._events: list[Event] = []
        self._end = self._due_ns = 0
        self._lock, self._streams, self._named = RLock(), _Streams(), set[int]()
        readings = [(monotonic_ns(), time_ns(), monotonic_ns()) for _ in range(9)]
        before, utc, after = min(readings, key=lambda reading: reading[2] - reading[0])
        self._shift_ns = utc - (before + after) // 2 - _ZERO_NS
        self.label = lru_cache(_MOST)(self._label)
        self._nvtx: Any = None
        with suppress(ImportError):
            self._nvtx = import_module("nvtx").get_domain("halox")

    def _label(self, name: str, category: str, on_gpu: bool = False, **args: Any) -> Label:
        shown = {key: arg for key, arg in args.items() if arg}
        text = json.dumps({"name": name, "cat": category, "ph": "X", "args": shown})[1:-1]
        return text, self._nvtx and self._nvtx.get_event_attributes(message=name), on_gpu

    def timed(self, label_of: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that makes a call, and adds its event, unless the label of its arguments is None."""
        fixed, events, thread = None if callable(label_of) else label_of, self._events, get_ident

        def run(*arguments: Any, **options: Any) -> Any:
            label = fixed or label_of(*arguments, **options)
            if label is None:
                return call(*arguments, **options)
            text, attributes, on_gpu = label
            mark = self._streams.begin() if on_gpu and self._file is not None else None
            if attributes is not None:
                self._nvtx.push_range(attributes)
            begin = monotonic_ns()
            try:
                return call(*arguments, **options)
            finally:
                end = monotonic_ns()
                if attributes is not None:
                    self._nvtx.pop_range()
                if mark is not None:
                    self._streams.end(text, *mark)
                events.append((text, thread(), begin, end - begin))
                if end > self._due_ns or len(events) >= _MOST:
                    self.write()

        return run

    def open(self, world: World) -> None:
        """Make the file of this rank once; an error of all ranks of a node is printed by its first rank."""
        if self._rank >= 0:
            return
        self._rank = rank = world.mpi.COMM_WORLD.rank
        try:
            os.makedirs(self._folder, exist_ok=True)
            self._file = FileIO(os.path.join(self._folder, f"rank-{rank:05}.json"), "w")
        except OSError as error:
            if world.node_rank == 0 or os.access(os.path.join(self._folder, ""), os.W_OK):
                self._give_up(error)
            return
        self._describe("process_name", 0, name=f"rank {rank} on {node()}")
        self._describe("process_sort_index", 0, sort_index=rank)
        self._describe("thread_name", get_ident(), name="calls")
        atexit.register(self.write)
        previous = sys.excepthook  # may end all ranks
        sys.excepthook = lambda *error: [each(*error) for each in (self.write, previous)][1]

    def write(self, *_: object) -> None:
        """Write the events so far, and those of streams that have ended."""
        with self._lock:
            self._due_ns = monotonic_ns() + _WRITE_NS
            count = len(self._events)
            events, self._events[:count] = self._events[:count], []
            if self._file is None or os.getpid() != self._process:
                return
            try:
                ended = [*self._streams.ended()]
                for stream in {stream for _, stream, *_ in ended} - self._named:
                    self._named.add(stream)
                    self._describe("thread_name", stream, name=f"GPU stream {stream:#x}")
                # Formatting floats would take longer than all the rest; Perfetto's tracks have 32 bits.
                shift, pid = self._shift_ns, self._rank
                lines = [
                    f'{{{text}, "pid": {pid}, "tid": {track % 2**31}, "ts": {begin + shift}e-3, "dur": {duration}e-3}}'
                    for text, track, begin, duration in events + ended
                ]
                self._put(",\n".join(lines))
            except Exception as error:  # of the disk or a GPU: the program goes on
                self._give_up(error)

    def _describe(self, kind: str, track: int, **args: object) -> None:
        event = {"name": kind, "ph": "M", "pid": self._rank, "tid": track % 2**31, "args": args}
        self._put(json.dumps(event))

    def _put(self, text: str) -> None:
        """Replace the end of the array by more objects and the end."""
        if self._file is not None and text:
            self._file.seek(self._end)
            self._end += self._file.write(f"{',' if self._end else '['}\n{text}\n]".encode()) - 2

    def _give_up(self, error: Exception) -> None:
        self._file = None
        print(f"halox: rank {self._rank} writes no trace (HALOX_TRACE): {error}", file=sys.stderr)


def install(folder: str) -> None:
    """Time the calls of this process from now on, in a file of the folder."""
    trace = _Trace(folder)

    def wrap(owner: Any, name: str, label_of: Any) -> None:
        setattr(owner, name, trace.timed(label_of, getattr(owner, name)))

    for line in _CALLS.strip().split("\n"):
        module, kind, *methods = line.split()
        owner = getattr(import_module(module), kind, import_module(module))
        for method in methods:
            wrap(owner, method, partial(_label_of_call, trace, kind, method))
    for method in _EXCHANGES:
        wrap(Runner, method, partial(_label_of_exchange, method))
    wait = trace.label("wait", "wait")
    wrap(Communicator, "round", wait)
    wrap(Communicator, "by_mpi", wait)
    make_world, make_runner, make_gather = World.__init__, Runner.__init__, Communicator.gatherer

    def world(self: World, *arguments: Any, **options: Any) -> None:
        make_world(self, *arguments, **options)
        trace.open(self)

    def runner(self: Any, *arguments: Any, **options: Any) -> None:
        for name, channel, messages in arguments[2]:
            for place, step in channel.timeline:
                way = "receive" if step in _ARRIVING else "send"
                nbytes = sum(message.nbytes for message in messages if message.direction == way)
                *holders, last = place.split(".")
                label = trace.label(step, "step", path=name, bytes=nbytes)
                wrap(reduce(getattr, holders, channel), last, label)
        make_runner(self, *arguments, **options)
        report, kind = self.report, self.report.operation
        sent = [row for row in report.rows if row.direction == "send" and row.peer != report.rank]
        path = ", ".join(sorted({f"{row.path}/{row.protocol}" for row in sent or report.rows}))
        args = {"path": path, "bytes": sum(row.nbytes for row in sent), "messages": len(sent)}
        of = partial(trace.label, category=kind, on_gpu=self.device is not None, **args)
        self.labels = {method: of(kind + half) for method, half in _EXCHANGES.items()}

    def gatherer(*arguments: Any) -> Any:
        return trace.timed(wait, make_gather(*arguments))

    World.__init__, Runner.__init__ = world, runner  # type: ignore[method-assign]
    Communicator.gatherer = gatherer  # type: ignore[method-assign,assignment]


def _label_of_call(trace: _Trace, kind: str, method: str, *arguments: Any, **named: Any) -> Label:
    """Label a call, with the bytes of the arrays that it is given, and a path or an expression."""
    nbytes = sum([getattr(one, "nbytes", 0) for one in (*arguments, *named.values())])
    what = next((str(one) for one in arguments[1:] if isinstance(one, (str, os.PathLike))), "")
    on_gpu = getattr(arguments[0], "device_id", None) is not None
    name = kind if method.startswith("__") else method
    return trace.label(name, kind, on_gpu, what=what, bytes=nbytes)


def _label_of_exchange(method: str, runner: Any, *arguments: Any) -> Label | None:
    # `Runner.run` with a phase is a part of another call.
    return None if method == "run" and len(arguments) > 1 else runner.labels[method]
