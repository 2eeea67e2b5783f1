"""The first error of a rank that goes on with its messages, until all ranks raise it together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Failure:
    """The first error of a rank."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def attempt(self, action: Callable[[], Any]) -> Any:
        """Return ``action()``, or None if it fails; not called after a failure."""
        return self.attempt_always(action) if self.error is None else None

    def attempt_always(self, action: Callable[[], Any]) -> Any:
        """Return ``action()``, a collective one that is called after a failure too, or None if it fails."""
        try:
            return action()
        except Exception as error:
            self.error = self.error or error
        return None
