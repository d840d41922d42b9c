"""The templates of what is written into a file: HTML and SVG. All that is filled in is escaped."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined


@cache
def environment(folder: Path | None = None) -> Environment:
    """Finds templates in ``folder``, if there is one, and in that of the reporters."""
    ours = PackageLoader("g4debug.reporters")
    return Environment(
        loader=ours if folder is None else ChoiceLoader([FileSystemLoader(folder), ours]),
        autoescape=True,
        auto_reload=False,  # a process may lose the right to read its templates again
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
