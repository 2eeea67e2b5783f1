"""The ``halox`` command."""

from __future__ import annotations

from halox.cli.command import main

__all__ = ["main"]
