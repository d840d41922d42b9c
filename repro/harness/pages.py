"""The pages that the suites write: a template beside the module that fills it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from g4debug.reporters.pages import environment
from g4debug.trapping.describe import versions


def fill(template: Path, **values: Any) -> str:
    """The text of a template of jinja2, which is given ``versions``, too: package -> version.

    Values are escaped in an SVG, and not in Markdown.
    """
    pages = environment(template.parent).overlay(
        autoescape=".svg" in template.suffixes, keep_trailing_newline=True
    )
    found = {"sglang": "?", "torch": "?", **versions()}
    return pages.get_template(template.name).render(values, versions=found)
