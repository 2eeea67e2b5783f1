"""Configuration of the documentation."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sphinx.domains.python import PyObject

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent), str(DOCS / "_ext")]

from halox._version import __version__  # noqa: E402

project = "halox"
author = "the halox developers"
copyright = "2026, the halox developers"
release = version = __version__

extensions = [
    "gallery",
    "measured",
    "mentions",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_design",
]
exclude_patterns = ["_build", "performance/log.md"]  # the log is for readers of the repository
templates_path = ["_templates"]
html_theme = "furo"
html_title = f"halox {release}"
html_static_path = ["_static"]
html_favicon = html_logo = "_static/halox.svg"
html_css_files = ["site.css"]
html_js_files = ["copy.js"]

# Names in docstrings become links. A name of halox that cannot be resolved is an error (nitpicky); names of arguments,
# attributes and other packages may stay without a link.
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [
    ("py:obj", r"[a-z_]+|(cupy|mpi4py|numpy|xarray|zarr)\..*"),
    ("py:(?!obj).*", r"(?!halox\b).*"),  # types described in words
]

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_mock_imports = ["torch"] * (find_spec("torch") is None)
autosummary_ignore_module_all = False
autosummary_context = {"builtins": sorted({*dir(dict), *dir(tuple), *dir(Exception)})}
maximum_signature_line_length = 80
napoleon_google_docstring = False
napoleon_use_ivar = True
for field in PyObject.doc_field_types:
    if field.name == "variable":
        field.label = "Attributes"

myst_enable_extensions = ["attrs_block", "colon_fence"]
myst_heading_anchors = 3

MADE_BY_HALOX = {
    "halox.Plan",
    "halox.Report",
    "halox.io.checkpoint.loading.Loaded",
    "halox.datatypes.BlockList",
    "halox.datatypes.Datatype",
    "halox.datatypes.Layout",
    "halox.datatypes.Signature",
    "halox.datatypes.StridedBlocks",
    "halox.decomposition.FieldLayout",
    "halox.plans.report.Row",
    "halox.grid.CoarseGrid",
    "halox.xarray.DatasetFields",
}
"""Classes that users do not construct: the pages omit the arguments of their constructors."""


INTERNAL = {"Report.measured", "Row.of"} | {
    f"FieldLayout.{name}"
    for name in ("cells", "indices", "is_flat_somewhere", "is_wide", "wall", "within_grid")
}
"""Methods that only halox calls; the pages omit them."""


def without_arguments(_app: Any, _kind: str, name: str, *_: Any) -> tuple[str, str] | None:
    """Omit the arguments of constructors and calls that users do not pass."""
    if name in MADE_BY_HALOX:
        return "", ""
    return ("()", "") if name == "halox.Plan.__call__" else None


def not_for_users(_app: Any, _kind: str, _name: str, found: Any, skip: bool, _: Any) -> bool | None:
    """Omit methods that only halox calls."""
    found = getattr(found, "func", found)  # of a cached property
    return getattr(found, "__qualname__", "") in INTERNAL or None


def setup(app: Any) -> None:
    """Register the functions above with Sphinx."""
    app.connect("autodoc-process-signature", without_arguments)
    app.connect("autodoc-skip-member", not_for_users)
