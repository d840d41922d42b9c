"""Device-side asserts on real schedulers: what was printed, what the tables were, who it was."""

from __future__ import annotations

from pathlib import Path

import installed_plugin
import pytest
from real_engine import ENGINE, Run, WhenAsked, drive

from g4debug.findings.record import Lookup

pytestmark = [*ENGINE, pytest.mark.once("what it tests is the same code on every release")]
HERE = Path(__file__).parent
DIE_AT = 6
VOCABULARY, HALF = 512, 256  # of the CPU engine's toy model
DRAFT = "the draft's token embedding"
LONG = pytest.mark.long("an engine for each way to die")


def asserting(folder: Path, mode: str = "mtp", **environ: str) -> Run:
    installed_plugin.install(folder / "site", "asserting", "asserting:register")
    environ = {"PYTHONPATH": installed_plugin.path(folder / "site", HERE), **environ}
    armed = {"SGLANG_TRTLLM_MHA_DEBUG": "1"}
    return drive(folder, str(HERE / "drive_dying.py"), mode, **armed, **environ)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    return WhenAsked(
        start=lambda: asserting(folder / "start", SHARD="1", AT_START="1"),
        serving=lambda: asserting(folder / "serving", SHARD="1", DIE_AT=str(DIE_AT)),
        sound=lambda: asserting(folder / "sound", DIE_AT=str(DIE_AT)),
        plain=lambda: asserting(folder / "plain", "plain", DIE_AT="1"),
        silent=lambda: asserting(folder / "silent", DIE_AT=str(DIE_AT), SILENT="1"),
    )


def death(run: Run):
    """The one record of the run, and its lookups by name."""
    assert run.status != 0
    assert "IT LIVES" not in run.log
    (record,) = run.dumps
    assert (record.finding.check, record.finding.kind) == ("flight-recorder", "device-assert")
    assert not any("could not be read" in x.why for x in record.lookups), record.lookups
    assert "TrapError" not in run.log
    return record, {x.name: x for x in record.lookups}


def span(x: Lookup) -> tuple[int, int, int, str]:
    return x.rows, x.low, x.high, x.verdict


@pytest.mark.parametrize(
    "name", ["start", "sound", *(pytest.param(n, marks=LONG) for n in ("serving", "plain"))]
)
def test_what_was_printed_is_in_the_dump_and_still_in_the_log(runs, name):
    record, _ = death(runs[name])
    (found,) = record.asserts
    assert (found.expression, found.line) == ("srcIndex < srcSelectDimSize", 1141)
    assert (found.file, found.function) == (
        "ATen/native/cuda/Indexing.cu",
        "indexSelectLargeIndex",
    )
    assert (found.block, found.thread, found.count) == ("0,0,0", "0,0,0", 3 * 64)
    assert runs[name].log.count("Assertion `srcIndex") >= 3 * 64
    assert "192 threads printed: `srcIndex < srcSelectDimSize`" in record.finding.got
    # Two processes of one server print to this file, but one rank alone runs kernels.
    assert "Other ranks" not in record.finding.got


def test_a_draft_with_a_part_of_the_vocabulary_is_named_at_start(runs):
    """Before the first step: so it is when the draft's graphs are captured."""
    record, found = death(runs["start"])
    assert record.finding.site == "scheduler.init"
    assert "flight-recorder in start-up: an index was out of range" in record.finding.headline
    assert record.steps == ()
    assert span(found[DRAFT]) == (HALF, 0, VOCABULARY - 1, "could")
    assert found[DRAFT].place == "models/gemma4_mtp.py"
    first = record.finding.cause.split("\n")[0]
    assert first.startswith(f"Of the lookups in LOOKUPS, only {DRAFT} (models/gemma4_mtp.py) has")
    assert "token ids 0 to 511 do not fit 256 rows" in first


@LONG
def test_a_draft_with_a_part_of_the_vocabulary_is_named_while_it_serves(runs):
    record, _ = death(runs["serving"])
    assert record.finding.location.step == DIE_AT
    assert record.finding.cause.startswith(f"Of the lookups in LOOKUPS, only {DRAFT} (")
    assert [x.name for x in record.lookups if x.verdict == "could"] == [DRAFT]


def test_where_everything_fits_nobody_is_accused(runs):
    record, found = death(runs["sound"])
    assert record.finding.cause.startswith("Which lookup it was is not known: no index is known")
    assert "could" not in {x.verdict for x in record.lookups}
    assert span(found[DRAFT]) == (VOCABULARY, 0, VOCABULARY - 1, "not known")
    assert span(found["the target's token embedding"]) == (
        VOCABULARY,
        0,
        VOCABULARY - 1,
        "not known",
    )
    # The assertion is an embedding's.
    assert found["req_to_token"].verdict == "cannot"
    assert found["req_to_token"].rows == 9
    assert 1 <= found["req_to_token"].low <= found["req_to_token"].high <= 8
    assert found["full_to_swa_index_mapping"].rows > found["full_to_swa_index_mapping"].high
    assert found["the write of KV to the full pool"].rows > 0
    assert found["the write of KV to the swa pool"].rows > 0
    assert found["the accepted tokens of a verify"].rows > 0
    assert found["the per-layer embedding"].never
    rope = found["the rotary embedding"]
    lengths = [n for step in record.steps for n in step.seq_lens]
    assert rope.rows > rope.high >= max(lengths)
    assert record.geometry["vocab_size"] == VOCABULARY


@LONG
def test_prompts_of_the_first_prefill_are_cleared(runs):
    """The host made these ids, and nothing but prefills was under way."""
    record, found = death(runs["plain"])
    assert [s.forward_mode for s in record.steps] == ["EXTEND"]
    target = found["the target's token embedding"]
    assert (target.exact, target.verdict) == (True, "cannot")
    assert 2 <= target.low < target.high < VOCABULARY
    assert found["the rotary embedding"].high == max(record.steps[-1].seq_lens) - 1
    assert DRAFT not in found


@LONG
def test_without_the_text_the_lookups_are_judged_all_the_same(runs):
    record, found = death(runs["silent"])
    assert record.asserts == ()
    assert "because the file that stderr goes to has no such line" in record.finding.got
    assert found["req_to_token"].verdict == "not known"
    assert len(found) == len(death(runs["sound"])[1])
