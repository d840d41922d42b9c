"""The pages that the suites write: a template beside the module that fills it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def fill(template: Path, **values: Any) -> str:
    """The text of a template of jinja2. In SVG what is filled in is escaped, in Markdown not."""
    environment = Environment(
        autoescape=".svg" in template.suffixes,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        loader=FileSystemLoader(template.parent),
    )
    return environment.get_template(template.name).render(values)
