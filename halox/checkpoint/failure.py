"""The first error of a rank, which continues its messages until all ranks raise the error together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Failure:
    """The first error of a rank."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def attempt(self, action: Callable[[], Any]) -> Any:
        """Return ``action()``, or None if it fails; the action is not called after a failure."""
        return self.attempt_always(action) if self.error is None else None

    def attempt_always(self, action: Callable[[], Any]) -> Any:
        """Return ``action()``, or None if it fails; the action is collective, and is also called after a failure."""
        try:
            return action()
        except Exception as error:
            self.error = self.error or error
        return None
