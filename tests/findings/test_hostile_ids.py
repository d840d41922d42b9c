"""An id that a client has chosen: in a sentence, in a line of the log, in a finding's lines."""

from __future__ import annotations

import logging

import pytest

from g4debug.dumps import reading
from g4debug.findings import names
from g4debug.findings.record import Finding, Location
from g4debug.findings.steps import Recorder
from g4debug.settings import Settings
from g4debug.trapping.describe import Describer
from g4debug.trapping.trap import MOST_LINES, Trap, TrapError, lines

pytestmark = pytest.mark.once("the code is ours alone")

HOSTILE = "\x1b[2Jr\r\n[ERROR] forged\u202e\x00" + "x" * (1 << 20)


def harmless(text: str) -> None:
    """Nothing in it steers a terminal, no line is forged, and it is not endless."""
    assert all(c.isprintable() or c == "\n" for c in text)
    assert not any(line.startswith("[ERROR]") for line in text.splitlines())
    assert len(text) < 30_000


def test_an_ordinary_id_stays_as_it_is():
    rid = "chatcmpl-0f3a9c51d2e84c1b"
    assert names.name(rid) == names.clean(rid) == names.line(rid) == rid


def test_a_hostile_one_is_short_and_printable():
    for text in (names.name(HOSTILE), names.line(HOSTILE)):
        harmless(text)
        assert "\n" not in text
    assert len(names.name(HOSTILE)) < 200


@pytest.fixture
def clean_log(caplog):
    logger = logging.getLogger("g4debug")
    before = list(logger.filters)
    names.clean_log()
    names.clean_log()
    assert len(logger.filters) <= len(before) + 1
    yield caplog
    logger.filters[:] = before


@pytest.mark.parametrize("value", [HOSTILE, ValueError(HOSTILE)], ids=["text", "error"])
def test_what_is_put_into_a_message_of_the_log_is_cleaned(clean_log, value):
    logging.getLogger("g4debug").warning("g4debug: %s: request %s, step %d", "it", value, 7)
    (record,) = clean_log.records
    harmless(record.getMessage())
    assert record.getMessage().startswith("g4debug: it: request \\x1b[2Jr\\r\\n[ERROR] forged")
    assert record.getMessage().endswith(", step 7")


def test_a_message_of_our_own_may_have_lines(clean_log):
    logging.getLogger("g4debug").warning("one\ntwo 100%")
    assert clean_log.records[0].getMessage() == "one\ntwo 100%"


@pytest.mark.parametrize("mode", ["raise", "contain", "log"])
@pytest.mark.parametrize("known", [True, False], ids=["located", "only in the texts"])
def test_the_lines_of_a_finding_are_harmless_and_its_dump_has_the_id(
    tmp_path, clean_log, mode, known
):
    found = Finding(
        check="page-table",
        kind="out-of-range",
        site="attn.trtllm_mha.layer_page_table",
        headline=f"g4debug: page-table: page 99 of request {HOSTILE}",
        location=Location(request=HOSTILE if known else ""),
        expected=f"a page of {HOSTILE}",
        got=f"99 of {HOSTILE}, and\nmore behind it",
        cause=f"request {HOSTILE}",
    )
    trap = Trap(
        Settings(debug=True, debug_dir=tmp_path / "dumps", mode=mode), Describer(Recorder(4))
    )
    if mode == "raise":
        with pytest.raises(TrapError) as error:
            trap.report(found)
        harmless(str(error.value))
        assert "\n            more behind it" in str(error.value)
    else:
        for _ in range(10):  # the 10th is logged, too
            trap.report(found)
    harmless(clean_log.text)
    (path,) = (tmp_path / "dumps").glob("*.pt")
    kept = reading.read(path).finding
    assert kept.location.request == found.location.request
    assert kept.got == found.got


def test_a_text_of_many_lines_says_that_it_is_cut():
    def told(rows: int) -> list[str]:
        got = "\n".join(f"row {n}" for n in range(rows))
        found = Finding("page-table", "oob", "site", "headline", Location(), "", got)
        return "\n".join(lines(found, None, "it is a test")).split("\n")

    assert told(MOST_LINES)[-2].strip() == f"row {MOST_LINES - 1}"
    assert [line.strip() for line in told(MOST_LINES + 1)[-3:-1]] == [
        f"row {MOST_LINES - 1}", "… (cut)",
    ]  # fmt: skip
