"""What a CUDA core dump says reaches CAUSE, FIX and NEXT of the report, no surer than it is."""

from __future__ import annotations

import dataclasses

import pytest
import real_cores

from g4debug.autopsy import examine
from g4debug.autopsy.core import Core
from g4debug.findings import kinds
from g4debug.findings.record import SCHEMA, Location, TrapRecord
from g4debug.reporters import _facts
from g4debug.tracers.flight_recorder.report import BLOCKING, NOT_KNOWN
from g4debug.tracers.flight_recorder.with_core import REMOVED, with_autopsy
from g4debug.triage.entry import entries

pytestmark = pytest.mark.once("a core is read without SGLang")
KINDS = kinds.KINDS["flight-recorder"]
TOLD = "CUDA core dump: none yet; the driver was told to write it to /dumps/g4debug-core-%h-%p-%t"


def died(name: str, cause: str = f"{NOT_KNOWN}\n{TOLD}{REMOVED}", kind="cuda-error", **fields):
    finding = KINDS[kind].finding(
        site="scheduler.run_event_loop", headline="g4debug: flight-recorder: it died",
        location=Location(), expected="a scheduler that keeps running", got="an error", cause=cause,
    )  # fmt: skip
    record = real_cores.record(name)
    return dataclasses.replace(record, finding=dataclasses.replace(finding, **fields), schema=1)


def read(record: TrapRecord, name: str) -> TrapRecord:
    found = examine.of_core(Core(memoryview(real_cores.core(name))), f"{name}.core", record)
    return with_autopsy(record, found)


def told(record: TrapRecord) -> dict[str, str]:
    """The report's last entries by their labels."""
    last = _facts.report(record, source="d.pt")[-1]
    return {
        b.label: b.command
        if isinstance(b, _facts.Next)
        else "\n".join(s.text for line in b.lines for item in line for s in item)
        for b in last
    }


def test_a_table_that_was_not_translated_is_in_cause_and_fix():
    name = "decode-larger-pool"
    before = died(name)
    assert told(before)["CAUSE"].startswith("not known")
    after = read(before, name)
    assert after.schema == SCHEMA
    report = told(after)
    first, file = report["CAUSE"].split("\n")
    assert first == (
        "By the CUDA core dump, most likely: page 384 is in the full pool (1024 pages) and not in "
        "the SWA pool (373 pages): this fits a table that was not translated"
    )
    assert "none yet" not in file
    assert file.startswith("CUDA core dump: decode-larger-pool.core; it was read, and AUTOPSY")
    wrong, untranslated = entries()[17].title, entries()[1].title
    assert report["FIX"] == (
        f"{kinds.PAGE}, '{wrong}' fits the core dump, and so may '{untranslated}'; else "
        f"{KINDS['cuda-error'].reference}"
    )
    assert report["TRIAGE"] == entries()[17].first_lines
    assert report["NEXT"] == kinds.ARMED


def test_what_a_launch_that_blocks_would_tell_is_known():
    name = "decode-larger-pool"
    after = told(read(died(name, next_command=BLOCKING), name))
    assert after["NEXT"] == f'g4debug triage "{entries()[17].title}"'
    foreign = told(read(died("foreign", next_command=BLOCKING), "foreign"))
    assert foreign["NEXT"] == BLOCKING


def test_what_the_tracers_said_stays():
    cause = "Page tables are innocent up to step 6.\nCUDA core dump: /dumps/core_1"
    lines = read(died("decode-uninitialised", cause), "decode-uninitialised").finding.cause
    first, second, third = lines.split("\n")
    assert "most likely: the index is 0x7fffffff" in first
    assert second == "Page tables are innocent up to step 6."
    assert third == "CUDA core dump: /dumps/core_1; it was read, and AUTOPSY has what it says"


def test_where_no_page_is_known_nothing_is_blamed():
    lost = told(read(died("decode-negative"), "decode-negative"))
    assert lost["CAUSE"].startswith(
        "By the CUDA core dump it is not known why the kernel _fwd_grouped_kernel_stage1 faulted. "
        "What is known: some page of V of layer 0 (swa pool)"
    )
    assert lost["FIX"] == KINDS["cuda-error"].reference
    foreign = told(read(died("foreign"), "foreign"))
    assert "most likely not a KV page: the kernel was given no KV buffer" in foreign["CAUSE"]
    assert "Look at the kernel foreign_scatter." in foreign["CAUSE"]
    assert foreign["FIX"] == KINDS["cuda-error"].reference


def test_a_page_without_a_cause_is_not_explained():
    name = "decode-larger-pool"
    record = died(name)
    found = examine.of_core(Core(memoryview(real_cores.core(name))), "c", record)
    finding = with_autopsy(record, dataclasses.replace(found, cause="", fits=())).finding
    assert finding.cause.startswith("By the CUDA core dump: most likely page 384 of K, layer 2")
    assert "Why, it does not tell." in finding.cause
    assert finding.reference == KINDS["cuda-error"].reference


@pytest.mark.parametrize("name", real_cores.NAMES)
def test_reading_it_again_changes_nothing_more(name):
    once = read(died(name), name)
    again = with_autopsy(once, once.autopsy)
    assert again == once


def test_a_black_box_gets_the_cause_too_and_a_tracers_finding_keeps_its_own():
    name = "decode-larger-pool"
    crashed = read(died(name, "A library called abort().", "native-crash"), name).finding
    assert crashed.cause.split("\n")[1] == "A library called abort()."
    assert "not translated" in crashed.cause
    page_table = kinds.KINDS["page-table"]["out-of-range"].finding
    own = page_table(site="", headline="", location=Location(), expected="", got="", cause="known")
    record = dataclasses.replace(died(name), finding=own)
    assert read(record, name).finding == own
    other = died(name, "the finding of rank 0", "other-rank")
    assert read(other, name).finding == other.finding


def test_an_assertion_names_its_file_too():
    finding = read(died("embedding"), "embedding").finding
    assert finding.kind == "device-assert"
    assert "none yet" not in finding.cause
    assert "CUDA core dump: embedding.core; it was read" in finding.cause
