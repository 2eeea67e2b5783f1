"""The built documentation: links, pictures, one entry per public name, and layout on a phone."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
import zlib
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import halox
from tests import browser, support
from tests.unit import kept

ROOT = Path(__file__).resolve().parents[2]
PHONE, TABLET, LAPTOP = 360, 800, 1280


class Links(HTMLParser):
    """The anchors of a page, and the targets of its links and pictures."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.sources: list[str] = []
        self.without_text: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if given.get("id"):
            self.ids.append(str(given["id"]))
        if tag in ("a", "link") and given.get("href"):
            self.links.append(str(given["href"]))
        if tag in ("img", "script") and given.get("src"):
            self.sources.append(str(given["src"]))
        if tag == "link" and given.get("rel") == "stylesheet":
            self.sources.append(str(given["href"]))
        if tag == "img" and not given.get("alt"):
            self.without_text.append(str(given.get("src")))


def _inputs() -> list[Path]:
    """Return the source files of the site."""
    made = {ROOT / "docs" / "_build", ROOT / "docs" / "reference"}
    files = [
        path for folder in ("docs", "examples", "halox") for path in (ROOT / folder).rglob("*")
    ]
    return sorted(
        path
        for path in [*files, *ROOT.glob("*.md")]
        if path.is_file() and "__pycache__" not in path.parts and not made & set(path.parents)
    )


def _build(files: list[Path], out: Path) -> None:
    """Build in a copy, since `make docs` writes into the folder and may run at the same time."""
    shutil.rmtree(out, ignore_errors=True)
    copy = out / "copy"
    for path in files:
        to = copy / path.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, to)
    for path in ROOT.iterdir():
        if not (copy / path.name).exists() and not path.name.startswith("."):
            (copy / path.name).symlink_to(path)
    ended = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "docs", str(out / "html")],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    shutil.rmtree(copy)


@pytest.fixture(scope="module")
def site() -> Path:
    """Return the folder of the built pages, which is cached until a source file changes."""
    support.require("mpi")
    support.require("sphinx")
    files = _inputs()
    name = kept.digest(sys.version, *(f"{path}{path.read_bytes()!r}" for path in files))
    return kept.made_once(f"site-{name}", lambda out: _build(files, out)) / "html"


def pages(site: Path) -> list[Path]:
    return sorted(site.rglob("*.html"))


def broken_links(site: Path) -> tuple[list[str], int, int]:
    """Return the broken links of all pages, and the numbers of links and of anchors that were checked."""
    found = {page.resolve(): Links(page) for page in pages(site)}
    broken, followed, anchors = [], 0, 0
    for page, links in found.items():
        for target in links.links + links.sources:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            there = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            followed += 1
            if there.is_dir():
                there /= "index.html"
            if not there.is_relative_to(site.resolve()) or not there.is_file():
                broken.append(f"{page.name}: {target}")
            elif parts.fragment and there in found:
                anchors += 1
                if unquote(parts.fragment) not in found[there].ids:
                    broken.append(f"{page.name}: {target}")
    return sorted(set(broken)), followed, anchors


@pytest.mark.full
def test_links_and_anchors_lead_somewhere(site: Path) -> None:
    broken, followed, anchors = broken_links(site)
    assert not broken, "\n".join(broken)
    assert followed > 1000 and anchors > 300


def test_broken_links_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<p id="here"></p><a href="#here"><a href="#gone"><a href="b.html#there"><a href="b.html#gone">'
        '<a href="c.html"><a href="../outside.html"><img src="none.png"><a href="https://example.org/none">'
    )
    (tmp_path / "b.html").write_text('<h1 id="there"></h1><a href="a.html">')
    (tmp_path.parent / "outside.html").touch()
    gone = ["#gone", "../outside.html", "b.html#gone", "c.html", "none.png"]
    assert broken_links(tmp_path) == ([f"a.html: {target}" for target in gone], 8, 4)


@pytest.mark.full
def test_pages_are_whole(site: Path) -> None:
    """Ids are unique, pictures have an alternative text, and pages load nothing from other hosts."""
    for page in pages(site):
        links = Links(page)
        twice = [name for name, times in Counter(links.ids).items() if times > 1]
        assert not twice, f"{page.name}: {twice}"
        assert not links.without_text, f"{page.name}: {links.without_text}"
        elsewhere = [source for source in links.sources if urlsplit(source).netloc]
        assert not elsewhere, f"{page.name}: {elsewhere}"


def _entries(site: Path) -> dict[str, str]:
    """Return the page of each documented Python name, from Sphinx's inventory."""
    _, _, compressed = (site / "objects.inv").read_bytes().partition(b"zlib.\n")
    lines = [line.split(" ", 4) for line in zlib.decompress(compressed).decode().splitlines()]
    python = [(name, place) for name, kind, _, place, _ in lines if kind.startswith("py:")]
    assert len(python) == len(dict(python))
    return dict(python)


@pytest.mark.full
def test_every_public_name_has_one_page(site: Path) -> None:
    entries = _entries(site)
    names = {f"halox.{name}": getattr(halox, name) for name in halox.__all__}
    names |= {f"halox.datatypes.{name}": None for name in halox.datatypes.__all__}
    names |= {
        f"halox.errors.{name}": None
        for name, value in vars(halox.errors).items()
        if inspect.isclass(value) and name not in halox.__all__
    }
    for name, value in names.items():
        together = name in ("halox.__version__", "halox.datatypes.TypeLike")
        page = f"reference/{name}.html"
        if together:
            assert name in entries
        else:
            assert entries[name].startswith(page), f"{name}: {entries[name]}"
            assert (site / page).is_file()
        if inspect.isclass(value) and not issubclass(value, Exception):
            for member, found in inspect.getmembers(value):
                if inspect.isfunction(found) and not member.startswith("_"):
                    internal = (name, member) in INTERNAL
                    assert (f"{name}.{member}" in entries) != internal, f"{name}.{member}"
    assert {name for name in entries if name.count(".") == 1} - {"halox.xarray"} <= set(names)


@pytest.mark.full
def test_guides_and_reference_are_linked_both_ways(site: Path) -> None:
    guide, entry = site / "checkpoints.html", site / "reference" / "halox.Grid.html"
    assert "reference/halox.Grid.html#halox.Grid.save" in Links(guide).links
    assert "../checkpoints.html" in Links(entry).links
    assert "halox.errors.StateError.html#halox.errors.StateError" in Links(entry).links


INTERNAL = {
    ("halox.Plan", "accepts"),
    ("halox.Plan", "hold"),
    ("halox.Plan", "views"),
    ("halox.Report", "measured"),
}


def test_attributes_are_written_one_by_one() -> None:
    """Sphinx would render "rank, size : int" in one line as a name and a type "(rank,)"."""
    for module in (halox, halox.datatypes):
        for name in module.__all__:
            text = inspect.getdoc(getattr(module, name)) or ""
            _, _, section = text.partition("Attributes\n----------\n")
            for line in section.split("\n\n")[0].splitlines():
                assert line.startswith(" ") or "," not in line.split(" : ")[0], f"{name}: {line}"


WIDTHS = """(() => {
  const wide = [], edge = document.documentElement.clientWidth + 1;
  const scrolls = (one) => {
    for (let up = one; up && up !== document.body; up = up.parentElement) {
      if (/(auto|scroll)/.test(getComputedStyle(up).overflowX)) return true;
    }
    return false;
  };
  for (const one of document.querySelectorAll("article *")) {
    const box = one.getBoundingClientRect();
    if (box.width > 0 && box.right > edge && !scrolls(one))
      wide.push(`${one.tagName}.${one.className} ${Math.round(box.right)}: ${one.textContent.trim().slice(0, 60)}`);
  }
  const root = document.documentElement;
  if (root.scrollWidth > innerWidth) wide.push(`the page is ${root.scrollWidth} wide`);
  return wide;
})()"""

PICTURES = """Promise.all(Array.from(document.images, async (one) => {
  one.loading = "eager";
  try { await one.decode(); } catch (error) {}
  return one.naturalWidth > 0 ? "" : one.src;
})).then((all) => ({number: all.length, missing: all.filter(Boolean)}))"""


@pytest.mark.full
def test_pages_in_a_browser(site: Path) -> None:
    """Pages fit the widths of a phone, a tablet and a laptop, and write nothing to the console."""
    support.require("browser")
    program, bad, pictures = browser.find(), [], 0
    assert program is not None
    opened = pages(site)
    assert len(opened) >= 35
    with browser.page(program) as page:
        for path in opened:
            page.resize(PHONE)
            page.open(path.as_uri())
            found = page.value(PICTURES)
            pictures += found["number"]
            bad += [f"{path.name}: no picture {one}" for one in found["missing"]]
            for width in (PHONE, TABLET, LAPTOP):
                page.resize(width)
                assert page.value("innerWidth") == width
                bad += [f"{path.name} at {width}: {one}" for one in page.value(WIDTHS)]
            bad += [f"{path.name}: {one}" for one in page.complaints()]
    assert not bad, "\n".join(bad)
    assert pictures >= 15


@pytest.mark.full
def test_pages_of_examples_have_the_length_and_the_time(site: Path) -> None:
    times = json.loads((ROOT / "docs" / "examples" / "times.json").read_text())
    for name, seconds in times.items():
        text = (site / "examples" / f"{name}.html").read_text(encoding="utf-8")
        lines = (ROOT / "examples" / f"{name}.py").read_text().count("\n")
        assert f": {lines} lines. The commands above take {seconds / 2:.0f} s on" in text


@pytest.mark.full
def test_blocks_of_code_can_be_copied(site: Path) -> None:
    """The button of an example's source copies the source, without the text of the button."""
    support.require("browser")
    program = browser.find()
    assert program is not None
    with browser.page(program) as page:
        page.open((site / "examples" / "heat.html").as_uri())
        page.value(
            "navigator.clipboard.writeText = async (text) => { window.copied = text; };"
            "Array.from(document.querySelectorAll('button.copy')).at(-1).click()"
        )
        assert page.value("window.copied") == (ROOT / "examples" / "heat.py").read_text()


def test_the_browser_notices(tmp_path: Path) -> None:
    """The checks above find a page that is too wide, lacks its picture and has a script error."""
    support.require("browser")
    program = browser.find()
    assert program is not None
    (tmp_path / "bad.html").write_text(
        "<!doctype html><article><p style='width: 500px'>wide</p>"
        "<div style='overflow-x: auto'><p style='width: 900px'>scrolls</p></div>"
        "<img src='none.png' alt='none'></article><script>nothing()</script>"
    )
    with browser.page(program) as page:
        page.resize(PHONE)
        page.open((tmp_path / "bad.html").as_uri())
        wide = page.value(WIDTHS)
        assert len(wide) == 2 and wide[0].startswith("P. 508: wide"), wide
        assert page.value(PICTURES)["missing"] == [(tmp_path / "none.png").as_uri()]
        told = json.dumps(page.complaints())
        assert "nothing is not defined" in told and "none.png" in told


@pytest.mark.full
def test_the_search_finds_pages(site: Path) -> None:
    support.require("browser")
    program = browser.find()
    assert program is not None
    with browser.page(program) as page:
        page.open((site / "search.html").as_uri() + "?q=checkpoint")
        found = page.value(
            "new Promise((done) => { const look = () => {"
            " const all = document.querySelector('#search-results');"
            " if (!all.innerText.includes('Search finished')) return setTimeout(look, 100);"
            " done(Array.from(all.querySelectorAll('li a'), (a) => a.href)); }; look(); })"
        )
        assert any("checkpoints.html" in one for one in found)
