"""Draws an SVG. Its colours follow the viewer's light or dark scheme."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from g4debug.reporters.pages import environment


def drawn(template: str, **values: Any) -> str:
    """The SVG that a template of this folder draws."""
    return environment(Path(__file__).parent).get_template(template).render(values) + "\n"
