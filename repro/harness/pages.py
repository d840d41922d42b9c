"""The pages that the suites write: a template beside the module that fills it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from g4debug.trapping.describe import versions


def fill(template: Path, **values: Any) -> str:
    """The text of a template of jinja2, which is given ``versions``, too: package -> version.

    In SVG what is filled in is escaped, in Markdown not.
    """
    environment = Environment(
        autoescape=".svg" in template.suffixes,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        loader=FileSystemLoader(template.parent),
    )
    found = {"sglang": "?", "torch": "?", **versions()}
    return environment.get_template(template.name).render(values, versions=found)
