"""The HTML report, as text and in a real headless browser."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import browser
from sample_kinds import KINDS, evicted
from sample_trap import sample_record

from g4debug.findings.record import PageEvent, Tape, TrapRecord
from g4debug.reporters import html

pytestmark = pytest.mark.once("a report is made without SGLang")

SAMPLES = {"page-table": sample_record, **KINDS}
SOURCE = "/tmp/dumps/x.pt"
EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&\u202e\x1b[31m"


def evil() -> TrapRecord:
    """A stranger's dump: markup in every text that it has."""

    def poison(value: object) -> object:
        if isinstance(value, str):
            return EVIL
        if isinstance(value, tuple):
            return tuple(map(poison, value))
        if isinstance(value, dict):
            return {EVIL + k: poison(v) for k, v in value.items()}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            changed = {f.name: poison(getattr(value, f.name)) for f in dataclasses.fields(value)}
            return dataclasses.replace(value, **changed)
        return value

    both = {n: getattr(KINDS["leak"](), n) for n in ("holdings", "events")}
    full = dataclasses.replace(
        sample_record(),
        transitions=KINDS["typestate"]().transitions,
        allocator=evicted().allocator,
        faults=("page-oob #1",),
        **both,
    )
    record = poison(full)
    assert isinstance(record, TrapRecord)
    return record


def large() -> TrapRecord:
    """More of everything than a page should show: 256 rows of 2048 columns, 3000 events."""
    record = evicted()
    table = dataclasses.replace(
        sample_record().table,
        values=np.full((256, 2048), 7),
        seq_lens=np.full(256, 2048 * 64),
        first_live=np.zeros(256, dtype=np.int64),
        bad=np.array([[200, 1000, 1 << 40]]),
        rids=(),
        rows_total=256,
        columns_total=2048,
    )
    events = tuple(
        PageEvent(i, "decode", "full", tuple(range(i, i + 200, 2)), 100, "r" * 200, "c" * 500)
        for i in range(3000)
    )
    return dataclasses.replace(record, table=table, allocator=events)


class Tags(HTMLParser):
    """All tags and attributes, and the text outside of <style>."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] != "style":
            self.text += data


def test_a_strangers_text_stays_text() -> None:
    page = html.render(evil(), source=EVIL)
    found = Tags(page)
    names = {tag for tag, _ in found.tags}
    assert not names & {"script", "img", "iframe", "object", "form", "base", "embed"}
    assert "alert(1)</script>" in found.text
    for tag, attributes in found.tags:
        assert not any(name.startswith("on") or name == "style" for name in attributes), tag
        for name in ("src", "href"):
            assert attributes.get(name, "#").startswith(("#", "data:,")), (tag, attributes)
    assert not {"\x1b", "\u202e"} & set(page)


@pytest.mark.parametrize("kind", SAMPLES)
def test_same_facts_as_show(kind: str) -> None:
    """Every word that ``show`` prints of the finding is in the page."""
    import io

    from g4debug.cli import make_console
    from g4debug.reporters import terminal

    record = SAMPLES[kind]()
    stream = io.StringIO()
    terminal.render(record, make_console(width=400, color=False, stream=stream), source=SOURCE)
    page = set(Tags(html.render(record, source=SOURCE)).text.split())
    said = {w for w in stream.getvalue().split() if any(c.isalnum() for c in w)}
    # Bars are drawn, marks are colour, and what the terminal cuts is folded away in the page.
    cut = {w for w in said if "…" in w}
    missing = {w for w in said - cut if not any(w.strip("▼▶◀") in p for p in page)}
    assert missing <= {"edge", "(--all)"}


def test_the_page_leaves_the_tape_out() -> None:
    tape = Tape(
        1, 16, False, "start", 0, 9, 1, 8, np.full(4, 0x1234567), (0,), {"size_full": 77777}
    )
    record = sample_record()
    with_tape = dataclasses.replace(record, tape=tape)
    assert html.render(with_tape, source=SOURCE) == html.render(record, source=SOURCE)


def test_a_large_dump_gives_a_page_that_a_phone_can_open() -> None:
    page = html.render(large())
    assert len(page) < 2 << 20
    text = Tags(page).text
    assert "2500 earlier events: g4debug show --json" in text
    assert str(1 << 40) in text


@pytest.fixture(scope="module")
def chromium() -> Iterator[browser.Browser]:
    path = browser.find()
    if path is None:
        pytest.skip(f"no headless browser: none of {', '.join(browser.NAMES)} is on the PATH")
    with contextlib.ExitStack() as stack:
        try:
            running = stack.enter_context(browser.launch(path))
        except RuntimeError as e:  # a distribution's stand-in that only says how to install it
            pytest.skip(f"{path} does not start: {e}")
        yield running


PAGES = {**SAMPLES, "evil": evil, "large": large}


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("kind", PAGES)
def test_in_a_browser(chromium: browser.Browser, tmp_path: Path, kind: str, width: int) -> None:
    record = PAGES[kind]()
    path = tmp_path / "report.html"
    path.write_text(html.render(record, source=SOURCE))
    for dark in (False, True):
        chromium.open(path, width, dark=dark)
        assert chromium.problems == []
        assert chromium.urls == [path.as_uri()], "the page fetched something"
        assert chromium.evaluate("document.scripts.length") == 0
        assert chromium.evaluate("innerWidth") == width
        assert chromium.evaluate("document.documentElement.scrollWidth") <= width
        # The style's hash in the policy is right: else the page would be bare.
        ground = chromium.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(16, 19, 23)" if dark else "rgb(255, 255, 255)")
    shown = chromium.evaluate("document.body.innerText")
    for label in ("WHERE", "EXPECTED", "GOT", "OWNER", "CAUSE", "NEXT"):
        assert label in shown
    if kind == "evil":
        assert "<script>alert(1)</script>" in shown
    else:
        assert record.finding.headline in shown
        assert record.finding.got.split("\n")[0] in shown
    shot = tmp_path / "page.png"
    chromium.screenshot(shot)
    assert shot.read_bytes().startswith(b"\x89PNG")


BROKEN = {
    "console": ("<script>1</script>", lambda b: b.problems),
    "fetch": ('<img src="http://127.0.0.1:9/x.png">', lambda b: b.problems),
    "scroll": (
        "<svg width='2000' height='9'></svg>",
        lambda b: b.evaluate("document.documentElement.scrollWidth") > 360,
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_the_browser_would_have_told(chromium: browser.Browser, tmp_path: Path, fault: str) -> None:
    """The three checks above can fail."""
    inserted, seen = BROKEN[fault]
    page = html.render(sample_record())
    path = tmp_path / "report.html"
    path.write_text(page.replace("<main>", f"<main>{inserted}"))
    chromium.open(path, 360)
    assert seen(chromium)


def test_on_a_phone_the_bad_cell_is_in_view(chromium: browser.Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    for record in (sample_record(), large()):
        path.write_text(html.render(record))
        chromium.open(path, 360, height=4000)
        if not chromium.evaluate("CSS.supports('scroll-initial-target: nearest')"):
            pytest.skip("this browser does not know scroll-initial-target")
        ends = "[r.left + 2, r.right - 2]"
        found = chromium.evaluate(
            "(c => (r => "
            f"{ends}.map(x => document.elementFromPoint(x, (r.top + r.bottom) / 2) === c))"
            "(c.getBoundingClientRect()))(document.querySelector('td.focus'))"
        )
        assert found == [True, True], "the cell is out of view, or under the row's number"
