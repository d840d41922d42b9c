"""The published pages of drawn and healthy servers: what they list is what the scripts run today.

A seed is the same server until somebody changes what is drawn, or adds a toy. Then the command on a
page makes other rows, and the page has to be made again. Nothing is run here but the dice.
"""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest

from g4debug.cpu.server import DEFAULT
from g4debug.hooking import targets

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None,
    reason="needs sglang: what is drawn depends on its release",
)
OF_RELEASE = targets.sglang_version()
HEALTHY = f"healthy-{OF_RELEASE}"


def read(name: str) -> str:
    path = DOCS / name
    if not path.is_file():
        pytest.skip(f"no page was made on {OF_RELEASE}")
    return path.read_text()


def seeds_of(text: str) -> range:
    """The seeds of the command that made a page."""
    first, count = map(int, re.findall(r"--first (\d+) --(?:servers|runs) (\d+)", text)[0])
    return range(first, first + count)


def rows(text: str, column: str) -> list[list[str]]:
    """The cells of the table whose first column has that name."""
    lines = iter(text.splitlines())
    next(line for line in lines if line.startswith(f"| {column} |"))
    next(lines)
    table = []
    for line in lines:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return table


def test_the_servers_of_the_page_are_those_that_its_seeds_draw(suite):
    text, draw = read(f"fuzz-healthy-{OF_RELEASE}.md"), suite("fuzz.draw")
    assert "--model any" in text
    drawn = [[str(s), draw.draw(s, draw.model_of(s)).words] for s in seeds_of(text)]
    assert [row[:2] for row in rows(text, "seed")] == drawn


def test_the_narrow_servers_of_the_page_are_those_that_its_seeds_draw(suite):
    text, narrow = read(f"fuzz-narrow-{OF_RELEASE}.md"), suite("fuzz.narrow_draw")
    drawn = [[str(seed), narrow.words(seed)] for seed in seeds_of(text)]
    assert [row[:2] for row in rows(text, "seed")] == drawn


def test_the_corruptions_of_the_page_are_those_that_its_seeds_draw(suite):
    """The page has no row for each seed, but says how many there are of each kind."""
    text, corrupt = read(f"fuzz-{OF_RELEASE}.md"), suite("fuzz.corrupt")
    drawn: Counter[str] = Counter()
    for seed in seeds_of(text):
        it = corrupt.draw(seed, corrupt.SERVERS[corrupt.server_of(seed)][0])
        drawn[f"{it.what} ({it.form})"] += 1
    told = {what: sum(map(int, counts)) for what, *counts in rows(text, "corrupted")}
    assert told == drawn


@pytest.mark.parametrize(
    "page",
    sorted((*DOCS.glob(f"{HEALTHY}.md"), *DOCS.glob(f"{HEALTHY}-*.md"))),
    ids=lambda p: p.stem,
)
def test_the_groups_of_the_page_are_those_that_its_model_has(suite, page):
    """Each of them was driven, or is listed as one that was not."""
    text, groups = page.read_text(), suite("healthy.groups")
    model = page.stem.removeprefix(HEALTHY).removeprefix("-") or DEFAULT
    known = groups.groups(model)
    driven = {row[0].strip("`") for row in rows(text, "engine")}
    rest = re.findall(r"`([^`]+)`", text.partition("were not run this time:")[2].partition("\n")[0])
    optional = {name for name, group in known.items() if group.short or group.refused}
    assert (driven | {*rest}) - optional == known.keys() - optional
    out = dict(re.findall(r"^- `([^`]+)`: (.+)\.$", text.partition("left out on")[2], re.M))
    assert out == dict(groups.left_out(model))
