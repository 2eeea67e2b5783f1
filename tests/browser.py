"""Headless Chromium, driven by its DevTools protocol over two pipes."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE = 300
"""Longest wait for a message of the browser, in seconds; enough for a busy machine."""

Answer = dict[str, Any]


class BrowserError(RuntimeError):
    """The browser has exited, is silent for PATIENCE seconds, or returned an error."""


def find() -> str | None:
    """Return the path of a Chromium, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """A tab of a browser."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._rest, self._number = b"", 0
        self._session: str | None = None
        self.events: list[Answer] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Answer:
        """Call a method of the protocol and return its result; events that precede it go to `events`."""
        self._number += 1
        number, message = self._number, {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while (answer := self._next(method)).get("id") != number:
            self.events.append(answer)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        result: Answer = answer["result"]
        return result

    def wait(self, event: str) -> None:
        """Wait until `events` contains an event of this name."""
        while all(one.get("method") != event for one in self.events):
            self.events.append(self._next(event))

    def _next(self, expected: str) -> Answer:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._reading], [], [], PATIENCE)
            if not ready:
                raise BrowserError(f"no answer to {expected} within {PATIENCE} s")
            more = os.read(self._reading, 1 << 16)
            if not more:
                raise BrowserError(f"ended before {expected}")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        answer: Answer = json.loads(message)
        return answer

    def resize(self, width: int, height: int = 800) -> None:
        """Resize the page, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def open(self, address: str) -> None:
        """Clear `events`, and load a page."""
        self.events.clear()
        failed = self.call("Page.navigate", url=address).get("errorText")
        if failed:
            raise BrowserError(f"{address}: {failed}")
        self.wait("Page.loadEventFired")

    def value(self, expression: str) -> Any:
        """Evaluate a JavaScript expression and return its value, awaited if it is a promise."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise BrowserError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def complaints(self) -> list[str]:
        """Return the console's errors since the page was opened: script errors and missing files."""
        found = []
        for event in self.events:
            told = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(told["exceptionDetails"]))
            elif event.get("method") == "Runtime.consoleAPICalled" and told["type"] == "error":
                found.append(str(told["args"]))
            elif event.get("method") == "Log.entryAdded" and told["entry"]["level"] == "error":
                found.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        return found


@contextmanager
def page(program: str) -> Iterator[Page]:
    """Context manager: a browser with one empty page."""
    to_read, writing = os.pipe()
    reading, to_write = os.pipe()

    def as_three_and_four() -> None:
        # Chromium reads commands from descriptor 3 and writes answers to 4. These numbers may belong to our own
        # pipes, so dup2 would close them: copy the pipes to higher numbers first.
        high_read = fcntl.fcntl(to_read, fcntl.F_DUPFD, 10)
        high_write = fcntl.fcntl(to_write, fcntl.F_DUPFD, 10)
        os.dup2(high_read, 3)
        os.dup2(high_write, 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        log = Path(profile) / "stderr"
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [
                    program,
                    "--headless=new",
                    "--remote-debugging-pipe",
                    f"--user-data-dir={profile}",
                    # Chromium's sandbox does not work for root in a container; the pages are trusted.
                    "--no-sandbox",
                    "--disable-gpu",
                    "--disable-dev-shm-usage",
                    "--disable-extensions",
                    "--no-first-run",
                    "--hide-scrollbars",
                ],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                preexec_fn=as_three_and_four,
                pass_fds=(3, 4),
            )
        os.close(to_read)
        os.close(to_write)
        try:
            yield Page(reading, writing)
        except (BrowserError, BrokenPipeError) as error:
            error.add_note(f"the browser wrote: {log.read_text(errors='replace')[-2000:]}")
            raise
        finally:
            # The browser and all its processes exit when the pipe closes.
            os.close(writing)
            os.close(reading)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
