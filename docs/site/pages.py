"""A hook of mkdocs: the site's pages are the files of this repository, at their own paths.

The pages at the top, those below docs/ and what they link to are added as they are, so a relative
link between two files leads to the same place on the site. A pattern in ``nav``, such as
``docs/cases/*.md``, stands for all the pages that it fits and that ``nav`` does not name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#:]+)\)")
TARGET = re.compile(r"\]\(([^)\s#:]+)")


def pages() -> list[str]:
    """The paths of all pages, from the root of the repository."""
    patterns = ("*.md", "docs/**/*.md", "benchmarks/*.md")
    return sorted({str(p.relative_to(ROOT)) for each in patterns for p in ROOT.glob(each)})


def linked(page: str) -> set[str]:
    """The files of the repository that a page links to, pictures too, and that are no pages."""
    folder = (ROOT / page).parent
    targets = {(folder / name).resolve() for name in TARGET.findall((ROOT / page).read_text())}
    files = (path for path in targets if path.is_file() and path.suffix != ".md")
    return {str(path.relative_to(ROOT)) for path in files}


def named(nav: Any) -> list[str]:
    """The pages and patterns of ``nav``, in its order."""
    if isinstance(nav, str):
        return [nav]
    return [
        path for part in (nav.values() if isinstance(nav, dict) else nav) for path in named(part)
    ]


def expanded(nav: Any, by_name: Sequence[str]) -> Any:
    """``nav`` with each pattern replaced by the pages that it fits and that are not in by_name."""
    if isinstance(nav, dict):
        return {title: expanded(part, by_name) for title, part in nav.items()}
    if not isinstance(nav, list):
        return nav
    out: list[Any] = []
    for part in nav:
        if isinstance(part, str) and "*" in part:
            fit = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(part))
            out += [page for page in fit if page not in by_name]
        else:
            out.append(expanded(part, by_name))
    return out


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = expanded(config.nav, named(config.nav))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    every = pages()
    for path in [*every, *sorted(set[str]().union(*map(linked, every)))]:
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A link to a folder becomes its text: a site does not list folders."""
    folder = (ROOT / page.file.src_uri).parent

    def without(link: re.Match[str]) -> str:
        return link[1] if (folder / link[2]).is_dir() else link[0]

    return LINK.sub(without, markdown)
