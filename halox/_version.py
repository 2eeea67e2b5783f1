"""The one place where the version stands; packaging reads it from here without an import."""

from __future__ import annotations

__version__ = "0.1.0"
