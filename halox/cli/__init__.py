"""The command ``halox``: runs programs on ranks, and describes, measures and predicts a machine.

`command` has the words and options, and a module for each subcommand does its work; `launcher` starts the ranks. Begin
with `command`. Nothing of the library imports this package.
"""

from __future__ import annotations

from halox.cli.command import main

__all__ = ["main"]
