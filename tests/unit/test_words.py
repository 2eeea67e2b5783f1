"""Rules for prose: summaries and headings begin with a noun or a verb, and words are the terms of MPI and CUDA."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Rooms that must stay without offenders.
CLEAN = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs",
    "apps",
    "asv_bench",
    "examples",
    "halox",
    "tools",
]

# A log of experiments, which is not edited later, and the built pages.
EXEMPT = ["docs/performance/log.md", "docs/_build"]

# Words to avoid, and their replacements. A space also matches the underscore in a name. Words with a capital letter are
# matched with case, other words without.
WORDS = {
    r"ways? of (a|the|its|that) path|path/way|no such way": "protocol",
    r"(path|ipc|staged|host) ways?": "protocol",
    r"narrow packets?|wide packets?": "LL packet, LL128-like packet",
    r"legs?|stretch(es)?": "segment, run",
    r"carriers?": "transport buffer",
    r"Ground|Surroundings|surroundings": "Context",
    r"Judge": "SelectionContext",
    r"announced|granted": "rts, cts",
    r"settled|drained": "ready, consumed",
    r"raise_to": "set, signal",
    r"start_at_once": "run",
    r"Spares|spares of|of spares": "pool",
    r"(been )?seen before": "cached, known",
    r"call(s|ed|ing)? off": "cancel",
    r"numbers? of (a|the|whole) fields?": "field reduction",
    r"rivals?": "baseline",
    r"headlines?": "target",
    r"early launch(es)?|launched early": "programmatic dependent launch",
    r"Cargo": "Payload",
    r"Stopwatch|stopwatch": "Timer",
    r"in vain": "without effect; deadlock",
    r"As of": "the same as for",
    r"can(not)? be had": "is possible, is available",
    r"g[io]es? its way": "travels",
    r"g[ai]ves? back|given back|giving back": "return, release",
    r"(lie|lies|lying) (in|on|at|beside|behind|there|where)": "is in, is on",
    r"is told (in|by)|are told (in|by)": "is described in",
    r"easily got wrong": "pitfall",
    r"c[ao]mes? to (hold|be|an end|its end|their end|its ends|their ends)": "the verb itself",
    r"options? come to|comes? to about": "result in, is about",
    r"come along": "take part",
    r"and (its|their|the) like": "and others, and similar",
    r"be it": "whether",
}

CLAUSE = re.compile(r"(What|Where|Which|Who|Whose|How|When|Why|That|If|As|So that)\b")
"""Start of a clause; a summary or a heading should begin with a noun or a verb. ("Whether" is allowed.)"""

_BETWEEN = r"[ _\n#/]+"  # between two words, in a name or across lines of a comment
_BANNED = re.compile(
    "|".join(
        rf"(?<![A-Za-z])(?{'' if re.search('[A-Z]', word) else 'i'}:{word})(?![A-Za-z])"
        for word in WORDS
    ).replace(" ", _BETWEEN)
)


class Offender(NamedTuple):
    """A clause in the place of a noun, or a word to avoid."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        """Return the offender in the format of compiler errors."""
        return f"{self.path}:{self.line}: {self.text}"


def banned(text: str) -> Iterator[tuple[int, str]]:
    """Yield line (from 0) and text of every word to avoid."""
    for match in _BANNED.finditer(text):
        yield text.count("\n", 0, match.start()), " ".join(match.group().split())


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of the docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        previous: ast.stmt | None = None
        for number, child in enumerate(node.body):
            is_text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if is_text and isinstance(child.value.value, str):
                attribute = isinstance(previous, ast.Assign | ast.AnnAssign)
                if number == 0 or attribute:
                    yield child.lineno, child.value.value
            previous = child


def clauses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of docstrings that begin with a clause."""
    for line, text in docstrings(tree):
        if CLAUSE.match(text.strip()):
            yield line, f"a clause as summary: {text.strip().splitlines()[0]}"


def python_offenders(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of the offenders in docstrings, comments, strings and defined names."""
    tree = ast.parse(source)
    yield from clauses(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from ((node.lineno + line, word) for line, word in banned(node.value))
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from ((node.lineno, word) for _, word in banned(node.name))
    comments = [""] * (source.count("\n") + 1)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0] - 1] = token.string
    yield from ((line + 1, word) for line, word in banned("\n".join(comments)))


def page_offenders(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of the offenders in a page; comments in its code blocks do not count as headings."""
    text = re.sub(r"^\| [^\n]*Error` \|[^\n]*$", "", text, flags=re.MULTILINE)  # error texts
    yield from ((line + 1, word) for line, word in banned(text))
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        fenced ^= line.lstrip().startswith("```")
        heading = re.match(r"#+ (.*)", line)
        if heading and not fenced and CLAUSE.match(heading[1]):
            yield number, f"a clause as heading: {heading[1]}"


def files(room: str) -> list[Path]:
    """Return the files of a room: the file itself, or all sources and pages in the folder."""
    path = ROOT / room
    found = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return [
        p
        for p in found
        if p.suffix in {".py", ".md", ".cu", ".h"}
        and not any(p.is_relative_to(ROOT / exempt) for exempt in EXEMPT)
    ]


def offenders(room: str) -> list[Offender]:
    """Return the offenders of a room."""
    found = []
    for path in files(room):
        text = path.read_text()
        check = {".py": python_offenders, ".md": page_offenders}.get(path.suffix, banned)
        name = path.relative_to(ROOT)
        found += [Offender(str(name), line, word) for line, word in check(text)]
        found += [Offender(str(name), 1, word) for _, word in banned(path.stem)]
    return found


@pytest.mark.parametrize("room", CLEAN)
def test_clean_rooms_stay_clean(room: str) -> None:
    assert files(room), f"{room} is gone: take it from CLEAN"
    found = offenders(room)
    assert not found, "\n".join(map(str, found))


def test_summaries_of_tests() -> None:
    paths = files("tests")
    assert Path(__file__).resolve() in paths
    found = [
        Offender(str(path.relative_to(ROOT)), line, text)
        for path in paths
        if path.suffix == ".py"
        for line, text in clauses(ast.parse(path.read_text()))
    ]
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""What it does."""', "a clause as summary"),
        ('def f():\n    """If asked, does it."""', "a clause as summary"),
        ('class A:\n    b: int = 1\n    """Where it is."""', "a clause as summary"),
        ('"""A thing.\n\nNothing waits in\nvain.\n"""', "in vain"),
        ("a = 1  # can be had", "can be had"),
        ("# Nothing waits in\n# vain.\n", "in # vain"),
        ('raise ValueError(f"{a} lies on device 1")', "lies on"),
        ("def call_off(): ...", "call_off"),
        ("class Stopwatch: ...", "Stopwatch"),
    ],
)
def test_offenders_in_python(source: str, expected: str) -> None:
    assert any(expected in text for _, text in python_offenders(source))


@pytest.mark.parametrize(
    "source",
    [
        '"""Whether a is b."""',
        '"""Whatever."""',
        "a = b  # as often as needed",
        '"""Segments of the kernel."""\n"""What is no docstring."""',
        "legend, reseen, arrivals = 1, 2, 3",
    ],
)
def test_innocent_python(source: str) -> None:
    assert not list(python_offenders(source))


def test_lines_of_offenders() -> None:
    assert list(python_offenders('"""A.\n\nB.\n\nSome rivals.\n"""\n')) == [(5, "rivals")]
    assert list(python_offenders("a = 1\n# a rival\n")) == [(2, "rival")]


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("# What it is\n", [(1, "a clause as heading: What it is")]),
        ("Text\n\n## How it works\n", [(3, "a clause as heading: How it works")]),
        ("Text\n\nIt lies\nin memory\n", [(3, "lies in")]),
        ("```sh\n# What follows is a comment\n```\n", []),
        ("| a buffer | `DeviceError` | out: lies on device 1 |\n", []),
        ("## Whether it works\n", []),
    ],
)
def test_offenders_in_pages(page: str, expected: list[tuple[int, str]]) -> None:
    assert list(page_offenders(page)) == expected
