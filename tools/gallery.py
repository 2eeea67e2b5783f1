"""``python3 -m tools.gallery [NAME ...]`` runs the examples, draws their pictures and records the time of each.

The commands are those of the pages in docs/examples. The pictures are written to docs/images, small ones without ticks
to docs/images/cards, and seconds of processor time to docs/examples/times.json. Ranks that wait keep their cores busy,
so half of the processor time is the run time on two cores, even if it is measured while other programs run.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "examples"
IMAGES = ROOT / "docs" / "images"
TIMES = PAGES / "times.json"


def commands(name: str) -> list[str]:
    """Return the commands of the first block on the page of an example."""
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    block = re.search(r"^```sh\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    if block is None:
        raise LookupError(f"docs/examples/{name}.md: no block of commands")
    return block[1].splitlines()


def run(name: str, images: Path) -> float:
    """Run an example in a folder of its own, move its pictures to ``images``, and return the processor time."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        begin = resource.getrusage(resource.RUSAGE_CHILDREN)
        for command in commands(name):
            subprocess.run(
                command,
                shell=True,
                check=True,
                cwd=folder,
                env={**os.environ, "MATPLOTLIBRC": str(images / "matplotlibrc")},
            )
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
        for picture in Path(folder).glob("*.png"):
            shutil.move(picture, images / picture.name)
    return end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime


def main(names: list[str]) -> None:
    """Run the examples of these names, or all."""
    times = json.loads(TIMES.read_text(encoding="utf-8")) if TIMES.exists() else {}
    for name in names or sorted(page.stem for page in PAGES.glob("*.md")):
        times[name] = round(min(run(name, IMAGES), run(name, IMAGES / "cards")), 1)
        text = json.dumps(times, indent=1, sort_keys=True)
        TIMES.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
