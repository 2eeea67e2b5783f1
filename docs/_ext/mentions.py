"""Links between guides and reference: from names in a guide to their entries, and from entries to the guides."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode

OWNERS = {
    "grid": "halox.Grid",
    "plan": "halox.Plan",
    "fft": "halox.FFT",
    "transpose": "halox.Transpose",
    "dt": "halox.datatypes",
}
"""Objects by the names of their variables in the guides."""

REFERENCE = "reference/"
MOST = 4
"""Limit of guides listed with an entry."""


def named(text: str, objects: Any) -> str | None:
    """Return the documented object that a piece of code names, or None.

    Examples of code: ``grid.save(path, u=u)``, ``Grid.save``, ``FieldError``.
    """
    match = re.fullmatch(r"((?:[A-Za-z_]\w*\.)+\w+|[A-Z]\w+)(?:\(.*\))?", text, re.DOTALL)
    if match is None:
        return None
    first, dot, rest = match[1].partition(".")
    full = f"{OWNERS.get(first, first)}{dot}{rest}"
    names = (full, f"halox.{full}", f"halox.errors.{full}")
    return next((name for name in names if name in objects), None)


def _literals(document: nodes.document) -> list[nodes.literal]:
    """Return inline code of running text: outside of links, headings and signatures."""
    apart = (nodes.reference, nodes.title, addnodes.pending_xref, addnodes.desc_signature)

    def is_apart(node: nodes.Node) -> bool:
        while node.parent is not None:
            node = node.parent
            if isinstance(node, apart):
                return True
        return False

    return [literal for literal in document.findall(nodes.literal) if not is_apart(literal)]


def collect(app: Sphinx, env: BuildEnvironment) -> None:
    """Count how often each guide mentions each object."""
    objects = env.domains.python_domain.objects
    guides: dict[str, Counter[str]] = {}
    for page in env.found_docs:
        if page.startswith((REFERENCE, "api", "changes", "index", "performance/")):
            continue
        for literal in _literals(env.get_doctree(page)):
            if name := named(literal.astext(), objects):
                guides.setdefault(name, Counter())[page] += 1
    env.halox_guides = guides  # type: ignore[attr-defined]


def resolve(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, content: nodes.TextElement
) -> nodes.reference | None:
    """Resolve a short name such as ``Grid.save`` in the docstring of another module."""
    objects = env.domains.python_domain.objects
    name = named(node["reftarget"], objects) if node.get("refdomain") == "py" else None
    if name is None:
        return None
    entry = objects[name]
    return make_refnode(app.builder, env.docname, entry.docname, entry.node_id, content, name)


class Mentions(SphinxPostTransform):
    """Link names to their entries, and list guides below the entries."""

    default_priority = 900

    def run(self, **_: Any) -> None:
        """Transform one page."""
        objects = self.env.domains.python_domain.objects
        page = self.env.docname
        for literal in _literals(self.document):
            name = named(literal.astext(), objects)
            if name is None or objects[name].docname == page:
                continue
            entry = objects[name]
            literal.parent.replace(
                literal,
                make_refnode(
                    self.app.builder, page, entry.docname, entry.node_id, literal.deepcopy(), name
                ),
            )
        if page.startswith(REFERENCE):
            for entry in self.document.findall(addnodes.desc):
                self._list_guides(page, entry)

    def _list_guides(self, page: str, entry: addnodes.desc) -> None:
        signatures = [child for child in entry if isinstance(child, addnodes.desc_signature)]
        names = [name for signature in signatures for name in signature["ids"]]
        guides = self.env.halox_guides.get(names[0] if names else "")  # type: ignore[attr-defined]
        if not guides:
            return
        line = nodes.paragraph(classes=["guides"])
        line += nodes.Text("Guides: ")
        for place, (guide, _) in enumerate(guides.most_common(MOST)):
            title = self.env.titles[guide].astext()
            if place:
                line += nodes.Text(", ")
            line += make_refnode(self.app.builder, page, guide, "", nodes.Text(title))
        entry[-1].insert(1, line)  # after the summary


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the transform."""
    app.connect("env-check-consistency", collect)
    app.connect("missing-reference", resolve)
    app.add_post_transform(Mentions)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
