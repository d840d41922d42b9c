"""Each draft of the toys, served by real SGLang with every tracer armed in mode `raise`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import drive_spec
import pytest
import releases
import told_status
from real_engine import ENGINE, drive, side_by_side

from g4debug import discovery

DRIVER = Path(drive_spec.__file__)
ARMED = {"G4DEBUG_TRACE": ",".join(discovery.names("tracer")), "G4DEBUG_MODE": "raise"}
LAYERED = "multi-layer-eagle"
# A verify on triton sees the whole window; without this, a decode does not (SGLang's).
WHOLE_WINDOW = {"G4DEBUG_FIX_TRITON_DECODE_WINDOW": "1"}
# Its tables are made once more before the first of its layers reads them, and no layer reads the
# full table, which is made, too.
MANY = "3*corrupt(30)"
STRESS = "seed=1;forced-retract=20%6*on;abort-request=5%2*on"  # these break nothing
LONG = pytest.mark.long("two engines for each draft")
pytestmark = ENGINE
DEFAULT = "trtllm_mha"  # the backend of an engine that is told of none
# Faults of spec-lifecycle that make sense for each of these workers.
FAULTS = (
    "accept-length=1*zero", "accept-length=1*too-long", "allocated-len=1*on", "bonus-token=1*on",
    "double-bookkeeping=1*on", "double-bookkeeping=1*kv", "double-bookkeeping=1*output",
    "double-bookkeeping=1*verify-ct", "future-row=1*publish", "future-row=1*stash",
    "future-row=1*read", "future-row=1*lost", "publish-order=1*early", "publish-order=1*twice",
    "publish-order=1*never", "sampled-token=1*on",
    "seq-len-off-by-one=1*device", "spec-info-dropped=1*on", "verify-input=1*bonus",
    "verify-input=1*draft", "verify-input=1*positions", "verify-input=1*rows",
)  # fmt: skip
# Those of a worker with a draft model, whose verify is a function of its own, and which hands
# sampled tokens on as bonus tokens.
WITH_A_MODEL = (
    "sampled-token=1*rows",
    "seq-len-off-by-one=1*plus", "seq-len-off-by-one=1*minus", "spec-info-wrong-type=1*on",
    "verify-input-left=1*on", "verify-result=1*length", "verify-result=1*token",
    "verify-result=1*rows",
)  # fmt: skip
DRAFT_WRITES = {"kv-writes": {"writes of the draft are not judged"}}
HIDDEN = {
    **dict.fromkeys(("eagle", "eagle3"), ("stale-hidden-state=1*on", "stale-hidden-state=1*draft")),
    # It hands on none to the next step's draft.
    LAYERED: ("stale-hidden-state=1*on",),
}


GPT_OSS = "gpt-oss"
# Of each tracer's faults some, with a target that has two pools: the draft's worker is the same.
ON_GPT_OSS = (
    "accept-length=1*zero", "bonus-token=1*on", "future-row=1*read", "publish-order=1*twice",
    "seq-len-off-by-one=1*device", "stale-hidden-state=1*draft", "verify-input=1*rows",
    "verify-result=1*token",
)  # fmt: skip


def target_of(draft: str) -> str:
    return discovery.load("draft", draft).targets[0]


def arguments(draft: str, drafts: bool = True, target: str = "", **more: object) -> str:
    """drafts: False for the same server without the draft. target: '' for its first one."""
    given = {"model": target or target_of(draft), **({"draft": draft} if drafts else {})}
    return json.dumps({**given, **more})


@pytest.mark.parametrize(
    ("draft", "target", "backend", "load"),
    [
        *(
            pytest.param(draft, target_of(draft), backend, load, marks=LONG)
            for draft in discovery.names("draft")
            for backend in (("fa3", "triton") if draft == LAYERED else ("trtllm_mha", "triton"))
            for load in ("mixed", "mixed-no-radix")
        ),
        pytest.param("eagle", "llama", "fa3", "mixed", marks=LONG),
        *(
            pytest.param("eagle3", GPT_OSS, backend, load, marks=LONG)
            for backend in ("trtllm_mha", "triton", "fa3")
            for load in ("mixed", "mixed-no-radix")
        ),
        *(
            pytest.param("ngram", GPT_OSS, backend, "mixed", marks=LONG)
            for backend in ("trtllm_mha", "triton")
        ),
    ],
)
def test_it_is_silent_and_its_tokens_are_those_without_a_draft(
    draft, target, backend, load, tmp_path
):
    releases.only_where_entered(target, backend, draft)
    given = {"attention_backend": backend, "target": target}
    runs = side_by_side(
        plain=lambda: drive(
            tmp_path / "plain",
            str(DRIVER),
            load,
            arguments(draft, drafts=False, **given),
            **WHOLE_WINDOW,
        ),
        armed=lambda: drive(
            tmp_path / "armed",
            str(DRIVER),
            load,
            arguments(draft, **given),
            **ARMED,
            **WHOLE_WINDOW,
            G4DEBUG_FAULTS=STRESS,
        ),
    )
    plain, armed = runs["plain"], runs["armed"]
    assert (plain.status, armed.status) == (0, 0), armed.log[-3000:]
    assert not armed.dumps
    assert "Retract requests" in armed.log
    told = told_status.read(armed.log)
    blind = {n for n, tracer in told.items() if told_status.blind(tracer)}
    assert blind == {"flight-recorder"}, told  # it counts nothing
    with_kv = draft != "ngram"  # it has no draft model
    assert told_status.limits(told) == (DRAFT_WRITES if with_kv else {})
    # A request that was aborted in one of the two is not in both.
    both = plain.result.keys() & armed.result.keys()
    assert len(both) > len(plain.result) // 2
    assert all(plain.result[rid] == armed.result[rid] for rid in both)


@LONG
@pytest.mark.parametrize(
    ("draft", "target", "fault"),
    [
        *(
            (draft, target_of(draft), fault)
            for draft in discovery.names("draft")
            for fault in (
                *FAULTS,
                *(WITH_A_MODEL if draft != "ngram" else ()),
                *HIDDEN.get(draft, ()),
            )
        ),
        *(("eagle3", GPT_OSS, fault) for fault in ON_GPT_OSS),
        *(("ngram", GPT_OSS, fault) for fault in ("bonus-token=1*on", "verify-input=1*draft")),
    ],
)
def test_its_faults_are_told(draft, target, fault, tmp_path):
    releases.only_where_entered(target, DEFAULT, draft)
    faults = {"G4DEBUG_FAULTS": f"seed=7;{fault}", "G4DEBUG_TRACE": "spec-lifecycle"}
    run = drive(tmp_path, str(DRIVER), "faults", arguments(draft, target=target), **faults)
    assert run.status != 0
    assert [dump.finding.check for dump in run.dumps] == ["spec-lifecycle"]


@LONG
def test_a_token_out_of_range_in_a_draft_extend_is_told_before_the_kernel_reads_it(tmp_path):
    releases.only_where_entered("llama", "triton", "eagle")
    run = drive(
        tmp_path,
        str(DRIVER),
        "faults",
        arguments("eagle", attention_backend="triton"),
        **ARMED,
        G4DEBUG_FAULTS="seed=7;token-oob=1*on@mode=draft_extend_v2",
    )
    found = run.dumps[0].finding
    assert (found.check, found.kind) == ("page-table", "out-of-range"), run.log[-3000:]
    assert found.location.forward_mode == "DRAFT_EXTEND_V2"
    assert found.location.runner == "draft"


@LONG
@pytest.mark.parametrize(
    ("draft", "target", "at", "mode", "runner"),
    [
        ("eagle", "llama", "target@mode=target_verify", "TARGET_VERIFY", "target"),
        ("eagle", "llama", "draft@mode=decode", "DECODE", "draft"),
        ("eagle3", GPT_OSS, "target@mode=target_verify", "TARGET_VERIFY", "target"),
        ("eagle3", GPT_OSS, "draft@mode=decode", "DECODE", "draft"),
        (LAYERED, "mimo-v2", "target@mode=target_verify", "TARGET_VERIFY", "target"),
        (LAYERED, "mimo-v2", "draft@mode=extend", "EXTEND", "draft"),
        (LAYERED, "mimo-v2", "draft@mode=draft_extend_v2", "DRAFT_EXTEND_V2", "draft"),
    ],
)
def test_a_page_out_of_range_on_fa3_is_told_before_the_kernel_reads_it(
    draft, target, at, mode, runner, tmp_path
):
    releases.only_where_entered(target, "fa3", draft)
    run = drive(
        tmp_path,
        str(DRIVER),
        "faults",
        arguments(draft, target=target, attention_backend="fa3"),
        **ARMED,
        G4DEBUG_FAULTS=f"seed=7;page-oob={MANY if draft == LAYERED else '1*on'}@runner={at}",
    )
    found = run.dumps[0].finding
    assert (found.check, found.kind) == ("page-table", "out-of-range"), run.log[-3000:]
    assert (found.location.forward_mode, found.location.runner) == (mode, runner)


@LONG
@pytest.mark.once("multi-layer EAGLE is served on the newest release only")
def test_a_window_that_nobody_fills_in_for_a_draft_extend_is_told(tmp_path):
    """The state of sglang #29858, in the worker that it is about. Its lists, too, are made once
    more before the first of its layers reads them."""
    run = drive(
        tmp_path,
        str(DRIVER),
        "faults",
        arguments(LAYERED, attention_backend="triton"),
        **ARMED,
        **WHOLE_WINDOW,
        G4DEBUG_FAULTS="seed=7;draft-window-unfilled=3*on",
    )
    found = run.dumps[0].finding
    assert "draft draft_extend_v2: the list of the sliding layers is left" in run.log
    assert found.check == "page-table", run.log[-3000:]
    assert (found.location.forward_mode, found.location.runner) == ("DRAFT_EXTEND_V2", "draft")


@LONG
@pytest.mark.parametrize(
    ("draft", "target"),
    [("eagle", "llama"), ("eagle3", "llama"), ("standalone", "llama"), ("eagle3", GPT_OSS)],
)
@pytest.mark.parametrize("backend", ["trtllm_mha", "triton"])
def test_another_requests_page_is_told_in_the_drafts_table(draft, target, backend, tmp_path):
    """The draft runs before the verify, which reads the same rows."""
    releases.only_where_entered(target, backend, draft)
    run = drive(
        tmp_path,
        str(DRIVER),
        "faults",
        arguments(draft, target=target, attention_backend=backend),
        **ARMED,
        G4DEBUG_FAULTS="seed=7;row-foreign-page=1*on",
    )
    found = run.dumps[0].finding
    assert (found.check, found.kind) == ("page-table", "foreign-page"), run.log[-3000:]
    assert found.location.runner == "draft"


@LONG
@pytest.mark.parametrize(
    ("draft", "target"), [("eagle", "llama"), ("eagle3", GPT_OSS), (LAYERED, "mimo-v2")]
)
@pytest.mark.parametrize("fault", ["kv-bit-flip=1*draft(30)", "kv-nan=1*draft"])
def test_kv_of_a_draft_that_changes_is_told(draft, target, fault, tmp_path):
    releases.only_where_entered(target, DEFAULT, draft)
    faults = {"G4DEBUG_FAULTS": f"seed=7;{fault}", "G4DEBUG_TRACE": "kv-integrity"}
    run = drive(tmp_path, str(DRIVER), "faults", arguments(draft, target=target), **faults)
    found = run.dumps[0].finding
    assert (found.check, found.kind) == ("kv-integrity", "kv-changed"), run.log[-3000:]
    assert found.location.runner == "draft"
    struck = re.search(r"g4debug fault .* in [KV] of (layer \d of the draft)", run.log)
    assert struck is not None
    assert f"of {struck[1]}" in found.headline
    assert draft == LAYERED or struck[1] == "layer 0 of the draft"
