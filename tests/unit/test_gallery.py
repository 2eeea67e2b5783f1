"""The gallery: every example has a page with its picture, its commands and the time of a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tools import gallery

EXAMPLES = sorted(path.stem for path in (gallery.ROOT / "examples").glob("*.py"))


def test_every_example_has_a_page_a_card_and_a_time() -> None:
    assert sorted(page.stem for page in gallery.PAGES.glob("*.md")) == EXAMPLES
    assert sorted(json.loads(gallery.TIMES.read_text())) == EXAMPLES
    index = (gallery.ROOT / "docs" / "examples.md").read_text()
    for mark in (":link: examples/{}.html", "(examples/{}.md)", "\nexamples/{}\n"):
        assert [name for name in EXAMPLES if mark.format(name) not in index] == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_commands_draw_the_picture_of_the_page(name: str) -> None:
    commands = gallery.commands(name)
    page = (gallery.PAGES / f"{name}.md").read_text()
    (picture,) = re.findall(r"!\[.+\]\(\.\./images/(\w+\.png)\)", page)
    assert any(command.startswith(f"halox run examples/{name}.py -n ") for command in commands)
    assert [re.findall(r"--png (\S+)", command) for command in commands if "--png" in command] == [
        [picture]
    ]
    for folder in (gallery.IMAGES, gallery.IMAGES / "cards"):
        assert (folder / picture).is_file()
    assert f"```{{example}} {name}\n```" in page


def test_a_run_moves_its_pictures_and_takes_processor_time(tmp_path: Path, monkeypatch) -> None:
    """The commands of a page run in order, in a folder from which ``examples`` is visible."""
    pages, images = tmp_path / "pages", tmp_path / "images"
    pages.mkdir()
    images.mkdir()
    (images / "matplotlibrc").touch()
    (pages / "toy.md").write_text(
        "# Toy\n\n```sh\ntest -f examples/heat.py && echo $MATPLOTLIBRC > a\n"
        "mv a toy.png\n```\n\n```sh\nfalse\n```\n"
    )
    monkeypatch.setattr(gallery, "PAGES", pages)
    assert gallery.run("toy", images) > 0
    assert (images / "toy.png").read_text() == f"{images}/matplotlibrc\n"
    assert not list(Path.cwd().glob("toy.png"))
