"""What ``g4debug replay`` prints, and its page: snapshots, hostile text, a real browser."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
import test_html
from sample_trap import sample_record
from test_html import EVIL, Tags, browser, evil
from test_report_snapshots import compare, fits, text

from g4debug.findings.status import Limit, TracerStatus
from g4debug.reporters import replay, replay_html
from g4debug.reporters.replay import Kept, Replayed, Scripted, Shrunk
from g4debug.reporters.running import Process

pytestmark = pytest.mark.once("a report is made without SGLang")

RESULT = Replayed(
    code=0,
    text="reproduced: g4debug: kv-allocator in step 282: swa pages 2, 3 and 11 are freed twice",
    more=(
        "282 of 282 steps are equal: the scheduler decided the same in each.",
        "It depends on nothing that a GPU computes.",
    ),
    notes=("attention_backend=fa3 is trtllm_mha here",),
    release="0.5.12.post1",
    requests=148,
    steps=282,
    equal=282,
    pages_compared=10,
    begins="start",
    seconds=21.7,
    tried=(("fix locked-prefix on", "it does not come"), ("SGLang 0.5.23", "it does not come")),
    shrunk=Shrunk(
        before=148,
        tried=31,
        seconds=24.2,
        whole=True,
        file="small.pt",
        kept=(
            Kept(7, "when all before it have ended", 448, 4, 4, "length"),
            Kept(9, "round 13", 448, 37, -1, "running"),
        ),
    ),
    script=Scripted("script.py", "SGLang's own error: AttributeError: no attribute 'merge_batch'"),
)


@pytest.mark.parametrize("width", [80, 120])
def test_a_result(width: int) -> None:
    got = text(lambda c: replay.render(RESULT, c), width)
    fits(got, width)
    compare(f"replay-{width}.txt", got)


def test_a_result_without_a_replay() -> None:
    result = Replayed(2, "cannot be replayed, because the dump has no tape")
    got = text(lambda c: replay.render(result, c), 80)
    assert got == "cannot be replayed, because the dump has no tape\n"


def test_what_is_left_of_a_search_without_time() -> None:
    why = "there was no time to try all"
    shrunk = dataclasses.replace(RESULT.shrunk, whole=False, why=why)
    got = text(lambda c: replay.render(dataclasses.replace(RESULT, shrunk=shrunk), c), 120)
    assert f"(31 tries, 24 s; {why})" in got
    none = Shrunk(148, 1, 3.0, True, "", ())
    got = text(lambda c: replay.render(dataclasses.replace(RESULT, shrunk=none), c), 120)
    assert "did not come a second time" in got
    gone = dataclasses.replace(none, whole=False, why="its process has ended; its log is empty")
    got = text(lambda c: replay.render(dataclasses.replace(RESULT, shrunk=gone), c), 120)
    assert "shrinking: its process has ended; its log is empty (1 tries, 3 s)" in got


def test_why_there_is_no_script() -> None:
    why = Scripted("", "the bug is a fault that g4debug injected, and plain SGLang has none")
    got = text(lambda c: replay.render(dataclasses.replace(RESULT, script=why), c), 120)
    assert f"no script was written: {why.text}" in got


def test_the_table_names_a_finding_that_is_not_the_dumps() -> None:
    other = dataclasses.replace(RESULT, table_of="g4debug: page-table: page 9")
    got = text(lambda c: replay.render(other, c), 120)
    named = "whether this comes, which was found here: g4debug: page-table: page 9"
    assert got.index(named) < got.index("as it was there")
    assert named in Tags(replay_html.render(other, sample_record(), "a.pt")).text


def test_why_no_fix_was_tried() -> None:
    none = dataclasses.replace(RESULT, tried=(), untried="the states differ")
    said = "not tried with another fix or release: the states differ"
    got = text(lambda c: replay.render(none, c), 120)
    assert said in got
    assert "as it was there" not in got
    assert said in Tags(replay_html.render(none, sample_record(), "a.pt")).text


def test_text_that_would_steer_a_terminal_is_shown() -> None:
    got = text(lambda c: replay.render(Replayed(2, "a\x1b[31mb", ("c\x1bd",)), c), 80)
    assert "\x1b" not in got


def test_what_a_tape_cannot_carry_is_no_worry_of_doctors() -> None:
    limited = TracerStatus("tape", limits=(Limit("it cannot carry this", "LoRA adapters", 9),))
    process = Process(1, has_status=True, tracers=(limited,))
    assert process.worries == []
    assert "LoRA" in limited.state


chromium = test_html.chromium  # the fixture
OF_A_STRANGER = dataclasses.replace(
    RESULT,
    text=EVIL,
    more=(EVIL,),
    notes=(EVIL,),
    release=EVIL,
    begins=EVIL,
    faults=EVIL,
    tried=((EVIL, EVIL),),
    table_of=EVIL,
    untried=EVIL,
    shrunk=dataclasses.replace(RESULT.shrunk, file=EVIL),
    script=Scripted(EVIL, EVIL),
)
PAGES = {
    "reproduced": (RESULT, sample_record()),
    "differs": (dataclasses.replace(RESULT, code=2, equal=99, differs=100), sample_record()),
    "until": (dataclasses.replace(RESULT, equal=99, shrunk=None), sample_record()),
    "other": (dataclasses.replace(RESULT, code=1, shrunk=None), sample_record()),
    "none": (Replayed(2, "cannot be replayed, because the dump has no tape"), sample_record()),
    "evil": (OF_A_STRANGER, evil()),
}


@pytest.mark.parametrize("name", PAGES)
def test_the_page_says_what_the_terminal_does(name: str) -> None:
    result, record = PAGES[name]
    said = text(lambda c: replay.render(result, c), 400)
    page = set(Tags(replay_html.render(result, record, "a.pt")).text.split())
    numbers = {w for w in said.split() if any(c.isdigit() for c in w)}
    assert not {w for w in numbers if not any(w.strip(",;:()") in p for p in page)}
    assert name == "evil" or set(record.finding.headline.split()) <= page


def test_a_page_of_a_strangers_dump_has_only_text() -> None:
    page = replay_html.render(*PAGES["evil"], EVIL)
    found = Tags(page)
    assert not {tag for tag, _ in found.tags} & {"script", "img", "iframe", "object", "form"}
    assert "alert(1)</script>" in found.text
    assert not {"\x1b", "\u202e"} & set(page)


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("name", PAGES)
def test_the_page_in_a_browser(
    chromium: browser.Browser, tmp_path: Path, name: str, width: int
) -> None:
    path = tmp_path / "replay.html"
    path.write_text(replay_html.render(*PAGES[name], "a.pt"))
    for dark in (False, True):
        chromium.open(path, width, dark=dark)
        assert chromium.problems == []
        assert chromium.urls == [path.as_uri()], "the page fetched something"
        assert chromium.evaluate("document.documentElement.scrollWidth") <= width
        style = "getComputedStyle(document.querySelector('header'))"
        assert chromium.evaluate(f"{style}.color") == "rgb(255, 255, 255)"
        assert chromium.evaluate(f"{style}.backgroundColor") in (
            "rgb(23, 107, 44)", "rgb(127, 82, 0)", "rgb(179, 18, 29)", "rgb(163, 20, 31)",
        )  # fmt: skip


def test_json() -> None:
    out = io.StringIO()
    replay.render_json(RESULT, out)
    found = json.loads(out.getvalue())
    assert found["shrunk"]["kept"][0]["prompt"] == 448
    assert found["equal"] == found["steps"] == 282
