"""Configuration of the documentation."""

from __future__ import annotations

import sys
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
    "measured",
    "mentions",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_design",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
html_theme = "furo"
html_title = f"halox {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]

# Names in docstrings become links where they are documented. All of halox's must be.
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!halox\b).*")]

autodoc_member_order = "bysource"
autodoc_typehints = "none"
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
    "halox.checkpoint.loading.Loaded",
    "halox.datatypes.BlockList",
    "halox.datatypes.Datatype",
    "halox.datatypes.Layout",
    "halox.datatypes.Signature",
    "halox.datatypes.StridedBlocks",
    "halox.xarray.DatasetFields",
}
"""Classes that users hold but do not construct: their constructors' arguments are left out."""


def without_arguments(_app: Any, _kind: str, name: str, *_: Any) -> tuple[str, str] | None:
    """Leave out the arguments of the constructors that are not for users."""
    return ("", "") if name in MADE_BY_HALOX else None


def setup(app: Any) -> None:
    """Register what is ours."""
    app.connect("autodoc-process-signature", without_arguments)
