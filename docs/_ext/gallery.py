"""The directive ``{example} NAME``: length, run time and source of a program in examples/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

DOCS = Path(__file__).resolve().parents[1]
TIMES = DOCS / "examples" / "times.json"


class Example(Directive):
    """The directive ``{example}``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return a sentence with the facts, and the source."""
        name = self.arguments[0]
        path = DOCS.parent / "examples" / f"{name}.py"
        for read in (path, TIMES):
            self.state.document.settings.env.note_dependency(str(read))
        source = path.read_text(encoding="utf-8")
        seconds = json.loads(TIMES.read_text(encoding="utf-8"))[name]
        facts = (
            f": {len(source.splitlines())} lines. The commands above take {seconds / 2:.0f} s on two cores of an AMD "
            f"EPYC virtual machine ({seconds:.0f} s of processor time), start and check included."
        )
        paragraph = nodes.paragraph(
            "", "", nodes.literal("", f"examples/{name}.py"), nodes.Text(facts)
        )
        return [paragraph, nodes.literal_block(source, source, language="python")]


def setup(app: Any) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("example", Example)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
