"""A drawing whose colours follow the viewer's light or dark scheme."""

from __future__ import annotations

from collections.abc import Iterable

from g4debug.reporters.pools_svg import STYLE


def page(width: int, height: float, title: str, style: str, body: Iterable[str]) -> str:
    """The SVG. style: CSS rules beside those of the reporter for pools."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img"><title>{title}</title><style>{STYLE} {style}</style>\n'
        f'<rect width="{width}" height="{height}" fill="var(--paper)"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )
