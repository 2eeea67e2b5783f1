"""Version of halox; the build reads it from this file without importing the package."""

from __future__ import annotations

__version__ = "0.1.0"
