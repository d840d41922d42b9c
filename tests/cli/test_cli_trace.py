"""``g4debug trace``: what it prints of a request, how it finds it, and what it says it lacks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from sample_requests import DECODES, ENDED, LONG, PAGES, WAITS, event, requests_record, step

from g4debug import cli
from g4debug.dumps import writing
from g4debug.findings.names import LONGEST_ID
from g4debug.findings.record import PageEvent, Step, TrapRecord

pytestmark = pytest.mark.once("commands do not import SGLang")
H100 = Path(__file__).parent.parent / "replay/h100"


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    return saved(tmp_path, requests_record())


def saved(folder: Path, record: TrapRecord) -> Path:
    return writing.write(writing.encode(record), folder, "g4debug-x.pt")


def run(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    assert cli.main(["trace", *map(str, arguments)]) == code
    out = capsys.readouterr()
    return " ".join((out.err if code else out.out).split())


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert cli.main(["trace", *map(str, arguments), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_request_that_ended(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, ENDED, dump, "--width", 200)
    for part in (
        f"request {ENDED}: aborted after 3.200 s; holds no pages",
        "prompt 700 tokens, none of them from the prefix cache; output 48 of at most 100",
        "chunk 1: 512 tokens, 0 to 511 of 700 took full pages 1-8; SWA pages 1-8: "
        "schedule_batch.py:2914 prepare_for_extend",
        "chunk 2: 188 tokens, 512 to 699; prefill complete took full pages 9-10, 12; SWA",
        "evicted behind its window SWA pages 1-2: schedule_batch.py:4123 maybe_evict_swa",
        "retracted with 8 tokens of output: its KV is given back, and it waits again",
        "scheduled, after it waited for 1.000 s (11 steps); 640 tokens (10 pages) were in the",
        "gave back full pages 30-31, 33, 60; SWA pages 30-31, 33, 60 (with pages of other",
        "61 3.200 s ended (abort: the server is going down, HTTP 503) with 48 tokens",
        "65 the prefix cache freed pages that came from this request freed full pages 1-2",
    ):
        assert part in text
    assert text.count("an abort of all requests was asked for: the server is going down") == 1
    assert "not known" not in text


def test_a_request_in_decode(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, DECODES, dump)
    assert (found["state"], found["since"]) == ("decode", 7.5)
    assert found["held"] == {"full": 3, "swa": 2}
    assert (found["prompt"], found["matched"], found["output"]) == (96, 64, 87)
    (decode,) = (m for m in found["moments"] if m["kind"] == "decode")
    assert (decode["first"], decode["last"]) == (32, 118)
    assert [line["text"] for line in decode["pages"]] == [
        "took full pages 41-42; SWA pages 41-42", "evicted behind its window SWA page 40"
    ]  # fmt: skip


def test_decode_steps_are_counted_where_all_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = tuple(step(n, DECODES) for n in range(30, 119))
    record = dataclasses.replace(requests_record(), steps=steps)
    text = run(capsys, DECODES, saved(tmp_path, record), "--width", 120)
    assert "32-118 0.560 s 87 steps of decode in 7.490 s, up to 87 tokens of output" in text


def test_a_request_that_waits(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, WAITS, dump, "--width", 120)
    assert f"request {WAITS}: waiting in the waiting queue for 5.500 s; holds no pages" in text


def test_many_chunks_are_one_line_until_all_are_asked_for(
    dump: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = run(capsys, LONG, dump)
    assert "11-18 0.110 s 8 more chunks (--all shows them) 19" in text
    assert "chunk 5" not in text
    assert f"request {LONG}: in no queue or batch of SGLang's when the dump was made" in text
    assert "chunk 5: 128 tokens, 512 to 639 of 1,280" in run(capsys, LONG, dump, "--all")


def test_the_beginning_of_an_id_will_do(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "5f0", dump)["request"] == ENDED
    several = run(capsys, "a81d", dump, code=2)
    assert f"the ids of 2 requests begin with 'a81d': {DECODES}, {WAITS}; give more" in several
    unknown = run(capsys, "a81d03c4e7f24b6f9d5c0b2e6a1f3d99", dump, code=2)
    assert f"no request 'a81d03c4e7f24b6f9d5c0b2e6a1f3d99'; it knows {DECODES}" in unknown
    assert "2 requests" not in run(capsys, "none", dump, code=2), "an owner that is no rid"


def test_an_id_that_is_longer_than_its_events_keep_is_one_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A client may choose any id. The steps have it whole, and an event its beginning."""
    rid, other = "x" * 2000, "x" * LONGEST_ID + "other"
    seen = [event(0, rid[:LONGEST_ID], "arrives", 0, tokens=9, number=1)]
    seen += [event(1, rid[:LONGEST_ID], "chunk", 1, begin=0, end=9, tokens=9)]
    record = dataclasses.replace(requests_record(), requests=tuple(seen), steps=(step(1, rid),))
    path = saved(tmp_path, record)
    for asked in (rid, rid[:1500], "x"):
        assert next(m["kind"] for m in told(capsys, asked, path)["moments"]) == "arrives"
    # It was in no step.
    never = saved(tmp_path, dataclasses.replace(record, steps=()))
    assert next(m["kind"] for m in told(capsys, rid, never)["moments"]) == "arrives"
    # Whose these events are is not known.
    both = saved(tmp_path, dataclasses.replace(record, steps=(step(1, rid, other),)))
    assert [m["kind"] for m in told(capsys, rid, both)["moments"]][:1] != ["arrives"]


def test_a_rid_that_came_again_is_followed_from_its_last_arrival(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = (event(100, ENDED, "arrives", 8, tokens=10, number=5),
             event(101, ENDED, "chunk", 8.1, begin=0, end=10, tokens=10, output=0))  # fmt: skip
    record = requests_record()
    record = dataclasses.replace(record, requests=(*record.requests, *again))
    found = told(capsys, ENDED, saved(tmp_path, record))
    assert [m["kind"] for m in found["moments"]][:3] == ["arrives", "match", "chunk"]
    assert not any(m["events"] for m in found["moments"])
    assert "This rid came 2 times" in found["unknown"][0]


def test_an_arrival_that_was_lost_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = requests_record()
    record = dataclasses.replace(record, requests=record.requests[2:], requests_lost=2)
    text = run(capsys, ENDED, saved(tmp_path, record), "--width", 200)
    assert "the request events begin in step 2, and 2 before that were dropped" in text
    assert "nothing of it was in the prefix cache" not in text, "its first chunk is not known"


def test_pages_that_were_lost_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = dataclasses.replace(requests_record(), allocator=tuple(PAGES[7:]))
    text = run(capsys, ENDED, saved(tmp_path, record), "--width", 200)
    assert "Page events are known from step 20 on; earlier ones were dropped" in text


def test_without_a_ledger_its_pages_are_not_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = dataclasses.replace(requests_record(), allocator=(), tracers=())
    text = run(capsys, DECODES, saved(tmp_path, record), "--width", 200)
    assert "Its pages are not known: no tracer with a page ledger was armed" in text
    assert "holds 3 full and 2 SWA pages" in text, "that is known without one"


def test_without_request_events_it_tells_what_the_steps_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = DECODES + DECODES  # longer than what a black box has of it in an event
    steps = (
        Step(99, "EXTEND", (cut,), (96,), rows=(1,), allocated=(128,), evicted=(0,)),
        *(Step(n, "DECODE", (cut,), (n,), rows=(1,), allocated=(192,), evicted=(64,))
          for n in range(100, 119)),
    )  # fmt: skip
    pages = (PageEvent(99, "extend", "full", (7,), 1, cut[:40], "schedule_batch.py:1 f"),)
    record = dataclasses.replace(requests_record(), requests=(), steps=steps, allocator=pages)
    text = run(capsys, DECODES, saved(tmp_path, record), "--width", 200)
    assert f"request {cut}: in decode (last step: 118); holds 3 full and 2 SWA pages" in text
    assert "99 prefill, up to token 96 took full page 7" in text
    assert "100-118 19 steps of decode, from 100 to 118 tokens" in text
    assert "This dump has no request events" in text
    assert "g4debug doctor --pid PID --request RID" in text


def test_a_black_box_does_not_say_where_requests_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = requests_record()
    events = tuple(e for e in record.requests if e.kind not in ("waits", "runs"))
    path = saved(tmp_path, dataclasses.replace(record, requests=events))
    assert f"request {WAITS}: waiting, as it had not been scheduled" in run(capsys, WAITS, path)
    text = run(capsys, DECODES, path, "--width", 120)
    assert f"request {DECODES}: in decode (last step: 118)" in text
    assert "32-118 decoded took full pages 41-42" in text
    assert "output 87" in text, "118 - 31, by the last step"


def test_it_opens_an_older_dump(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "r5-267", H100 / "healthy-0.5.15.post1.pt", "--width", 200)
    assert "request r5-267: in decode (last step: 576); holds 16 full and 16 SWA" in text


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("rid", [ENDED, DECODES, LONG])
def test_no_line_is_wider_than_asked_for(
    dump: Path, capsys: pytest.CaptureFixture[str], rid: str, width: int
) -> None:
    assert cli.main(["trace", rid, str(dump), "--width", str(width)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= max(width, 48), "a narrow text gets 20 columns in any case"


def test_a_strangers_id_steers_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b[2J\nrid"
    record = dataclasses.replace(
        requests_record(), requests=(event(1, evil, "arrives", 0, tokens=-1, note="\x1b[1m"),)
    )
    path = saved(tmp_path, record)
    assert cli.main(["trace", "\x1b", str(path)]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert cli.main(["trace", "nothing", str(path)]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_a_dump_that_claims_a_billion_steps_is_shown_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    far = 10**15
    events = (
        event(1, "a", "chunk", 0, begin=0, end=9, tokens=9),
        event(far, "a", "ends", 1, output=9, note="stop"),
    )
    record = dataclasses.replace(requests_record(), requests=events, steps=())
    assert f"2-{far} " in run(capsys, "a", saved(tmp_path, record), "--width", 120)


@pytest.mark.parametrize("box", [True, False])
def test_pages_of_a_request_whose_id_begins_alike_are_not_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], box: bool
) -> None:
    """SGLang names the samples of one request X_0, X_1; a black box keeps 40 bytes of an id."""
    whole = "conversation-" + "7" * 27  # 40 bytes
    one, two = f"{whole}_0", f"{whole}_1"
    events = tuple(
        e
        for i, rid in enumerate((whole, one, two) if not box else (one, two))
        for e in (
            event(1, rid, "arrives", 0, tokens=9, number=i + 1),
            event(2, rid, "chunk", 1, begin=0, end=9, tokens=9),
        )
    )
    pages = (PageEvent(2, "extend", "full", (7,), 1, whole, "x.py:1 f"),)
    record = dataclasses.replace(requests_record(), requests=events, allocator=pages, steps=())
    path = saved(tmp_path, record)
    text = run(capsys, one, path, "--width", 120)
    assert "page 7" not in text
    assert ("are the same in 1 other request of this dump" in text) is box
    if not box:
        assert "page 7" in run(capsys, whole, path, "--width", 120)
    alone = dataclasses.replace(record, requests=events[-2:])
    assert "page 7" in run(capsys, two, saved(tmp_path, alone), "--width", 120)


def test_an_id_that_was_cut_in_a_character_keeps_its_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rid = "é" * 9 + "x" + "é" * 20
    events = (event(2, rid, "chunk", 1, begin=0, end=9, tokens=9),)
    pages = (PageEvent(2, "extend", "full", (7,), 1, "é" * 9 + "x" + "é" * 10, "x.py:1 f"),)
    record = dataclasses.replace(requests_record(), requests=events, allocator=pages, steps=())
    assert "page 7" in run(capsys, "é", saved(tmp_path, record), "--width", 120)
