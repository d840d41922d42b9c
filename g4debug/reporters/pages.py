"""The templates of what is written into a file: HTML and SVG. All that is filled in is escaped."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined
from markupsafe import Markup

from g4debug import __version__
from g4debug.findings.names import clean


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


def page(pages: Environment, name: str, created: str, **values: Any) -> str:
    """The page of the template ``name.html``, with the style ``name.css``.

    It contains no script, its Content-Security-Policy would not run one, and it fetches nothing.
    created: the dump's date.
    """
    style = Markup(pages.get_template(f"{name}.css").render())
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return pages.get_template(f"{name}.html").render(
        style=style,
        policy=f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'",
        made=clean(f"g4debug {__version__}, {created}"),
        **values,
    )
