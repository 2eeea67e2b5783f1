"""``python -m halox`` is the ``halox`` command."""

from __future__ import annotations

import sys

from halox.cli import main

if __name__ == "__main__":
    sys.exit(main())
