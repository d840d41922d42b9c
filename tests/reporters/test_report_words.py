"""What a report says of numbers, places and the next command."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path

import pytest
from sample_kinds import evicted
from sample_trap import sample_record

from g4debug.cli import make_console
from g4debug.findings.kinds import KINDS, Contain
from g4debug.findings.record import Pool, Step, TrapRecord
from g4debug.reporters import _facts, html, terminal
from g4debug.reporters._evidence import percent

pytestmark = pytest.mark.once("a report is made without SGLang")

ROOT = Path(__file__).parents[2]
CASES = sorted((ROOT / "docs" / "cases").glob("*.md"))
TRIAGE = "\n".join(path.read_text() for path in (*CASES, ROOT / "TRIAGE.md"))
MENDED = {
    check: {k.name for k in of_check.values() if k.contain is Contain.MENDS}
    for check, of_check in KINDS.items()
    if any(k.contain is Contain.MENDS for k in of_check.values())
}
CONTAIN = "G4DEBUG_MODE=contain SGLANG_TRTLLM_MHA_DEBUG=1 <your launch command>"


def shown(record: TrapRecord, width: int = 100) -> str:
    stream = io.StringIO()
    terminal.render(record, make_console(width=width, color=False, stream=stream))
    return stream.getvalue()


def with_finding(**changes: object) -> TrapRecord:
    record = sample_record()
    return dataclasses.replace(record, finding=dataclasses.replace(record.finding, **changes))


def located(**changes: object) -> TrapRecord:
    at = dataclasses.replace(sample_record().finding.location, **changes)
    return with_finding(location=at)


@pytest.mark.parametrize(
    ("used", "size", "said"),
    [
        (0, 1000, "0%"),
        (1, 1000, "<1%"),
        (4, 1000, "<1%"),
        (5, 1000, "1%"),
        (14, 1000, "1%"),
        (15, 1000, "2%"),
        (994, 1000, "99%"),
        (995, 1000, ">99%"),
        (999, 1000, ">99%"),
        (1000, 1000, "100%"),
        (1 << 2000, 7, "999%"),
    ],
)
def test_a_share_is_rounded_but_neither_empty_nor_full_by_rounding(used, size, said):
    assert percent(used, size) == said


def test_all_shares_follow_one_rule():
    """Of 64,000 tokens 320 are in use: the pools said 1 %, and the steps said 0 %."""
    pool = Pool("full", 1001, 64, 64_000, used_tokens=320)
    record = dataclasses.replace(
        sample_record(), pools=(pool,), steps=(Step(1, "DECODE", ("a",), (5,), full_used=320),)
    )
    page = html.render(record).partition("<main>")[2]
    for text in (shown(record), page):
        assert re.findall(r"\d+%", text).count("1%") >= 2
        assert "0%" not in text


def test_a_forward_inside_a_step_of_another_mode_says_so():
    record = located(step=118, forward_mode="DECODE")
    steps = (*record.steps[:-1], dataclasses.replace(record.steps[-1], forward_mode="EXTEND"))
    said = "DECODE inside a step of mode EXTEND"
    assert said in shown(dataclasses.replace(record, steps=steps))
    assert said in html.render(dataclasses.replace(record, steps=steps))
    assert "inside a step" not in shown(record)


def test_host_and_ranks_are_told_and_what_is_not_known_too():
    text = shown(located(host="node7", dp_rank=1, rank=2, pp_rank=0))
    assert "host node7 · DP rank 1 · TP rank 2 · PP rank 0\n" in text
    assert "not known" not in text.partition("CHECK")[0]
    text = shown(located(host="node7", rank=2))
    assert "host node7 · TP rank 2 · not known: DP rank, PP rank\n" in text
    text = shown(located(rank=-1))
    assert "not known: host, DP rank, TP rank, PP rank\n" in text


def test_arguments_without_values_are_told_by_name():
    record = dataclasses.replace(
        sample_record(), arguments={"page_size": 64, "api_key": "set", "chat_template": "set"}
    )
    text = shown(record)
    assert "ARGUMENTS page_size=64\n" in text
    assert "set, values not in the dump: api_key, chat_template\n" in text


def test_a_free_that_was_stopped_is_not_shown_like_one_that_happened():
    record = evicted()
    last = dataclasses.replace(record.events[-1], stopped=True)
    stopped = dataclasses.replace(record, events=(*record.events[:-1], last))
    for text in (shown(stopped), html.render(stopped)):
        assert "evict, stopped" in text
        assert "stopped by g4debug" in text
    assert "stopped" not in shown(record)


def test_page_numbers_in_html_are_whole():
    record = sample_record()
    table = record.table
    assert table is not None
    values = table.values.copy()
    values[3, 8] = 10_000_000
    bad = table.bad.copy()
    bad[0, 2] = 10_000_000
    page = html.render(
        dataclasses.replace(record, table=dataclasses.replace(table, values=values, bad=bad))
    )
    assert page.count("10000000") >= 3  # the cell, the list of bad cells, how far the table goes
    assert not re.search(r"\b\d+e\d+\b", page.partition("<main>")[2])


def test_in_html_cause_fix_and_next_stand_near_the_top():
    page = html.render(sample_record()).partition("<main>")[2]
    at = [page.index(f"<dt>{label}</dt>") for label in ("WHERE", "CAUSE", "FIX", "NEXT", "GOT")]
    assert at == sorted(at)
    assert at[-1] < page.index("PAGE TABLE")


# --- the next command ------------------------------------------------------------------------


def next_of(record: TrapRecord) -> _facts.Next:
    (found,) = [b for g in _facts.report(record) for b in g if isinstance(b, _facts.Next)]
    return found


def test_after_a_drill_the_next_command_unsets_the_faults():
    record = dataclasses.replace(with_finding(next_command=CONTAIN), faults=("page-oob #1: x",))
    found = next_of(record)
    assert found.command.startswith("unset G4DEBUG_FAULTS")
    assert "unset G4DEBUG_FAULTS" in shown(record)
    assert "unset" not in next_of(with_finding(next_command=CONTAIN)).command


def test_contain_is_suggested_only_for_what_it_mends():
    assert set(MENDED) == {"page-table", "kv-allocator", "kv-writes"}
    for check, kinds in MENDED.items():
        for kind in kinds:
            found = next_of(with_finding(check=check, kind=kind, next_command=CONTAIN))
            assert found.command == CONTAIN
            assert "answers are wrong" in found.note
    for check, kind in (
        *(("page-table", k) for k in ("use-after-free", "evicted-in-window", "row-too-short")),
        *(("kv-allocator", k) for k in ("double-alloc", "maps-freed", "evicted-in-window")),
        *(("kv-writes", k) for k in ("use-after-free", "foreign-page", "cached-page")),
        ("another", "double-free"),
    ):
        found = next_of(with_finding(check=check, kind=kind, next_command=CONTAIN))
        assert "contain" not in found.command
        assert "<your launch command>" in found.command
        assert "Do not serve on with G4DEBUG_MODE=contain" in found.note


@pytest.mark.parametrize("check", ["kv-writes", "kv-allocator", "swa-allocator"])
def test_the_advice_to_contain_is_kept_of_a_finding_that_it_mends(check):
    """Also of dumps from before the tracer was called kv-allocator."""
    kind = "mismatch" if check == "kv-writes" else "double-free"
    found = next_of(with_finding(check=check, kind=kind, next_command=CONTAIN))
    assert found.command == CONTAIN
    assert "answers are wrong" in found.note


def test_triage_says_the_same_of_contain():
    kinds = set(re.findall(r"`(page-table|kv-allocator|kv-writes): ([a-z-]+)`", TRIAGE))
    of_tables = {k for c, k in kinds if c == "page-table"}
    # Of tables: all but those that are named. Of allocators: only those that are named.
    said = TRIAGE.partition("Do not use it for `use-after-free`,")[2].partition("there the right")[
        0
    ]
    never = {"use-after-free", *re.findall(r"`([a-z-]+)`", said)}
    assert MENDED["page-table"] == of_tables - never
    said = TRIAGE.partition("contain` for the findings at a free:")[2].partition("there.")[0]
    assert MENDED["kv-allocator"] == set(re.findall(r"`([a-z-]+)`", said))
    said = TRIAGE.partition("is replaced by the token's own place. Not so for")[2].partition(":")[0]
    never = set(re.findall(r"`([a-z-]+)`", said))
    assert MENDED["kv-writes"] == {k for c, k in kinds if c == "kv-writes"} - never


# --- rows without a request ------------------------------------------------------------------


def test_a_row_whose_request_is_not_known_is_not_called_padding():
    record = sample_record()
    table = record.table
    assert table is not None
    rids = (*table.rids[:5], "", *table.rids[6:])
    record = dataclasses.replace(record, table=dataclasses.replace(table, rids=rids))
    rows = dict(re.findall(r"^ +(\d) +(\S+) +\d+ ", shown(record), re.M))
    assert (rows["5"], rows["7"]) == ("–", "(pad)")  # row 7 reads nothing but the reserved page
    page = html.render(record)
    assert page.count('title="(pad)"') == 1
