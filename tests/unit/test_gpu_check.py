"""What of the GPU check can be tested without a GPU: the digest that ties its result to the sources."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tests.gpu.check import ROOT, sources_sha256


def test_digest_of_sources(tmp_path: Path) -> None:
    package = tmp_path / "halox"
    for name, content in {"b.py": b"2", "a/z.cu": b"1", "a/__pycache__/z.pyc": b"no"}.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_bytes(content)
    wanted = hashlib.sha256(b"halox/a/z.cu\x001" + b"halox/b.py\x002").hexdigest()
    assert sources_sha256(tmp_path) == wanted


def test_order_of_paths_is_beyond_doubt() -> None:
    """Sorting by path text and by path components must agree, or two readers could differ."""
    paths = [p for p in (ROOT / "halox").rglob("*") if p.is_file()]
    assert sorted(paths) == sorted(paths, key=lambda p: p.as_posix())
