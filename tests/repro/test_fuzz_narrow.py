"""repro/fuzz.py --narrow: who stands must be told, who is served must not be accused, and a run in
which too few stood proves nothing."""

from __future__ import annotations

import dataclasses
import importlib
import io
import time

import pytest
from sample_trap import sample_record

from g4debug.dumps import writing

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None,
    reason="needs sglang: a server's kind depends on its release",
)
RECORDER = "flight-recorder"
BARE, MENDED = 1001, 1002  # the seeds of a server without the fixes, and with them


@pytest.fixture
def suite(suite):
    """``suite(name)``: a module of the suite."""
    return lambda name: suite(f"fuzz.{name}")


@pytest.fixture
def judged(suite, tmp_path):
    """``judged(status, stood, findings)``: whether a server is good, and what is said of it."""
    narrow = suite("narrow")

    def judge(status, stood, *findings, seed=BARE):
        for n, (check, kind) in enumerate(findings):
            record = sample_record()
            told = dataclasses.replace(
                record.finding, check=check, kind=kind, headline=f"g4debug: {check} {kind}"
            )
            data = writing.encode(dataclasses.replace(record, finding=told))
            writing.write(data, tmp_path / "dumps", f"{n}.pt")
        log = tmp_path / "armed.log"
        log.write_text("")
        result = {"requests": 7, "stood": stood, "refused": ["no room"], "told": 5.4}
        ran = narrow.Outcome("armed", status, 9.0, log, result if status == 0 else {})
        seen = narrow.judge(seed, ran, tmp_path)
        return seen.good, seen.text

    return judge


def test_a_seed_is_a_server_that_may_stand(suite):
    drawn = suite("narrow_draw")
    seeds = range(drawn.FIRST, drawn.FIRST + 400)
    shapes = {seed: drawn.draw(seed) for seed in seeds}
    assert shapes == {seed: drawn.draw(seed) for seed in seeds}
    assert len({shape.words for shape in shapes.values()}) > 300
    likely = []
    for seed, shape in shapes.items():
        engine = shape.engine
        if drawn.short(shape):
            assert not drawn.fixed(seed)  # no fix is made for that
            continue
        chunk = engine["chunked_prefill_size"]
        assert chunk + 128 <= drawn.room(shape) < 2 * chunk
        unlimited = engine["max_running_requests"] is None and not shape.mtp
        overlap = not engine.get("disable_overlap_schedule")
        likely.append(unlimited and overlap and bool(engine.get("disable_radix_cache")))
    assert 0.4 < sum(likely) / len(likely) < 0.7  # as sglang #36458: most, and not all
    assert sum(drawn.short(shape) for shape in shapes.values()) > 10
    for key, values in {"page_size": 3, "chunked_prefill_size": 6, "max_running_requests": 3,
                        "disable_radix_cache": 2, "attention_backend": 2}.items():  # fmt: skip
        assert len({shape.engine.get(key) for shape in shapes.values()}) == values, key


def test_a_seed_of_before_is_the_same_server(suite):
    """docs/fixes.md and docs/cases/08-hang.md name them."""
    drawn = suite("narrow_draw")
    assert drawn.words(50) == (
        "MTP, page_size=64, attention_backend=trtllm_mha, max_total_tokens=4096, "
        "swa_full_tokens_ratio=0.109375, max_running_requests=2, chunked_prefill_size=256"
    )
    shape = drawn.draw(1)
    assert (drawn.room(shape), shape.engine["chunked_prefill_size"]) == (384, 384)


@pytest.mark.parametrize("kind", ["hang", "starved"])
def test_who_stands_and_is_told_is_good(judged, kind):
    good, said = judged(0, 2, (RECORDER, kind))
    assert good
    assert said == f"7 requests, 1 refused, 2 stood: g4debug: {RECORDER} {kind}."


def test_who_stands_and_is_not_told_is_bad(judged):
    assert judged(0, 2) == (False, "7 requests, 1 refused, 2 stood: that was not told.")


@pytest.mark.parametrize("kind", ["killed", "exception"])
def test_only_a_finding_that_says_it_stands_tells_it(judged, kind):
    good, said = judged(0, 1, (RECORDER, kind))
    assert not good
    assert said.endswith("that was not told.")


@pytest.mark.parametrize("kind", ["hang", "starved"])
def test_who_is_told_and_was_served_is_bad(judged, kind):
    good, said = judged(0, 0, (RECORDER, kind))
    assert not good
    assert said.endswith(f"0 stood, but it was told: g4debug: {RECORDER} {kind}")


def test_who_is_served_in_silence_is_good(judged):
    assert judged(0, 0) == (True, "7 requests, 1 refused, 0 stood.")


def test_who_dies_must_be_told_too(judged):
    assert judged(1, 0) == (False, "It did not complete (exit status 1). Nothing told it.")
    good, said = judged(1, 0, (RECORDER, "exception"))
    assert good
    assert said == f"It did not complete (exit status 1). g4debug: {RECORDER} exception"


def test_that_it_stood_does_not_tell_why_it_died(judged):
    assert not judged(1, 0, (RECORDER, "hang"))[0]


def test_who_never_ends_is_told_by_who_says_that_it_stands(judged):
    assert not judged(None, 0)[0]
    good, said = judged(None, 0, (RECORDER, "hang"))
    assert good
    assert said == f"It took too long and was stopped after 9 s. g4debug: {RECORDER} hang"


@pytest.mark.parametrize(("status", "stood"), [(0, 0), (0, 2), (1, 0)])
def test_any_other_finding_is_bad(judged, status, stood):
    found = (("page-table", "stale"), (RECORDER, "hang"))
    assert judged(status, stood, *found) == (False, "A finding: g4debug: page-table stale")


def test_who_stands_with_the_fixes_is_bad(judged):
    good, said = judged(0, 1, (RECORDER, "hang"), seed=MENDED)
    assert not good
    assert said == f"7 requests, 1 refused, 1 stood, with the fixes: g4debug: {RECORDER} hang"


def test_who_is_served_with_the_fixes_is_good(judged):
    assert judged(0, 0, seed=MENDED)[0]


@pytest.mark.parametrize(("stood", "proves"), [(0, False), (9, False), (10, True), (25, True)])
def test_a_run_in_which_too_few_stood_proves_nothing(suite, monkeypatch, tmp_path, stood, proves):
    narrow = suite("narrow")

    def one(seed, folder):
        stands = not narrow.fixed(seed) and seed < BARE + 2 * stood
        return narrow.Seen(seed, True, "fine", 1.0, 7, 0, int(stands), 5.5 if stands else None)

    monkeypatch.setattr(narrow, "one", one)
    out = io.StringIO()
    console = narrow.Console(file=out, width=300)
    page = tmp_path / "page.md"
    assert narrow.run(console, BARE, 50, tmp_path, page) is proves
    for text in (out.getvalue(), page.read_text()):
        assert f"Of 25 servers without the fixes {stood} stood, of 25 with them 0." in text
        assert ("It proves nothing:" in text) is not proves


def test_a_single_bad_server_is_enough(suite, monkeypatch, tmp_path):
    narrow = suite("narrow")

    def one(seed, folder):
        return narrow.Seen(seed, seed != BARE + 4, "the text", 1.0, 7, 0, 1, 5.5, "a deadlock")

    monkeypatch.setattr(narrow, "one", one)
    page = tmp_path / "page.md"
    assert not narrow.run(narrow.Console(file=io.StringIO()), BARE, 10, tmp_path, page)
    assert "Bad: 1005." in page.read_text()
    assert "| **the text** |" in page.read_text()
    assert "| some stood: a deadlock | 5 |" in page.read_text()


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (
            "request a: A deadlock. It lacks 64 tokens of the SWA pool, no request runs\n"
            "as sglang #36458: SGLang frees what is behind the window only\n"
            "the fix parked-chunk is for such a request, and is off: X=1 turns it on",
            "a deadlock in the SWA pool, as sglang #36458, for which there is parked-chunk",
        ),
        (
            "request a: A deadlock. No step can free enough: the full pool has 768 tokens in all",
            "a deadlock in the full pool",
        ),
        ("not known", "no reason"),
    ],
)
def test_equal_reasons_are_equal(suite, cause, reason):
    finding = dataclasses.replace(sample_record().finding, cause=cause)
    assert suite("narrow").reason(finding) == reason


def test_when_it_was_told_is_counted_from_the_last_batch(suite, monkeypatch, tmp_path):
    log = tmp_path / "log"
    log.write_text("[10:00] Prefill batch, #new-seq: 1\ng4debug: flight-recorder: an older one\n")
    lines = suite("batch_lines").BatchLines(log)
    now = lines.began
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def at(seconds, text):
        nonlocal now
        now = start + seconds
        with log.open("a") as sink:
            sink.write(text)
        lines.look()

    start = now
    at(1.0, "")
    assert lines.told is None  # what was there before does not count
    at(2.0, "Decode batch, #running-req: 1\n")
    at(6.0, "g4debug: armed: flight-recorder\n")
    assert (lines.began, lines.told) == (start + 2.0, None)
    at(7.5, "g4debug: flight-recorder: the scheduler hangs: the event")  # not yet the whole line
    assert lines.told is None
    at(8.0, " loop runs\n")
    at(9.0, "g4debug: flight-recorder: once more\n")
    assert lines.told == pytest.approx(6.0)
    at(10.0, "Prefill batch, #new-seq: 1\n")  # it went on
    assert (lines.began, lines.told) == (start + 10.0, None)
