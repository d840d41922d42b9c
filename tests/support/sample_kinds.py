"""One record per kind of finding, beside sample_trap.py's page table: realistic, and constant."""

from __future__ import annotations

import dataclasses

from sample_trap import RIDS, sample_record, sample_steps

from g4debug.findings.record import (
    DeviceAssert,
    Finding,
    Holding,
    Location,
    Lookup,
    PageEvent,
    Transition,
    TrapRecord,
)

A, B = RIDS[3], RIDS[5]


def _record(finding: Finding, **changes: object) -> TrapRecord:
    return dataclasses.replace(sample_record(), finding=finding, table=None, **changes)


def _at(**changes: object) -> Location:
    known = Location(process="scheduler", pid=4711, rank=0, step=118, forward_mode="DECODE")
    return dataclasses.replace(known, **changes)


def evicted() -> TrapRecord:
    """Allocator: the window's eviction freed a page that the next step still reads."""
    events = (
        PageEvent(96, "extend", "full", (55, 56, 57), 3, A, "schedule_batch.py:1650 prepare"),
        PageEvent(96, "map", "swa", (21,), 1, A, "swa_memory_pool.py:474 alloc_extend"),
        PageEvent(
            117,
            "evict",
            "swa",
            (19, 20, 21),
            3,
            A,
            "schedule_batch.py:2744 _evict_swa",
            "tokens 0..192 of 513, the window begins at token 1",
        ),
    )
    tail = tuple(
        PageEvent(
            50 + i,
            ("decode", "decode", "free")[i % 3],
            ("full", "swa")[i % 2],
            tuple(range(i, i + 1 + i % 4)),
            1 + i % 4,
            RIDS[i % 7],
            "schedule_batch.py:2013 alloc_for_decode",
        )
        for i in range(40)
    )
    finding = Finding(
        check="kv-allocator",
        kind="evicted-in-window",
        site="alloc.free_swa",
        headline=f"g4debug: kv-allocator: SWA page 21 was evicted inside the window of request {A}",
        location=_at(request=A),
        expected="only pages whose last token is before seq_len - window = 513 - 512",
        got="SWA page 21 (tokens 128..191), still read by the next 127 steps",
        owner=f"request {A}, since step 96",
        history=("step 96: extend", "step 96: map", "step 117: evict"),
        cause="the eviction point was computed from the length after this step's tokens",
        reference="TRIAGE.md, 'A SWA page is evicted inside the window'",
        next_command="G4DEBUG_MODE=log SGLANG_TRTLLM_MHA_DEBUG=1 <your launch command>",
    )
    return _record(finding, events=events, allocator=tail + events)


def wrong_typestate() -> TrapRecord:
    """Speculation: the verify input was left on the batch (seed PR #22)."""
    cycle = (
        ("draft", "draft-input", "verify-input"),
        ("verify", "verify-input", "draft-extend-input"),
        ("extend-after-decode", "draft-extend-input", "draft-input"),
        ("end", "draft-input", "draft-input"),
    )
    done = [
        Transition(step, site, before, after, requests=7)
        for step in (115, 116, 117)
        for site, before, after in cycle
    ]
    bad = (
        Transition(118, "draft", "draft-input", "verify-input", 7),
        Transition(118, "verify", "verify-input", "verify-input", 0, "every request finished"),
        Transition(
            118,
            "merge",
            "verify-input",
            "verify-input",
            2,
            "expected draft-input: the worker returned early and left its verify input",
            ok=False,
        ),
    )
    finding = Finding(
        check="spec-lifecycle",
        kind="wrong-state",
        site="batch.merge",
        headline="g4debug: spec-lifecycle: a verify input is on the batch when it is merged",
        location=_at(forward_mode="TARGET_VERIFY"),
        expected="draft-input (or none, for an idle batch)",
        got="verify-input (FrozenKVMTPVerifyInput)",
        cause="the worker returned before it set the next draft input: no request was left",
        reference="fix idle-draft-input (seed PR #22)",
    )
    return _record(finding, transitions=(*done, *bad))


def leak() -> TrapRecord:
    """Pool: pages that nobody holds, with the owner that lost them."""
    holdings = (
        Holding(
            "full",
            (12, 13, 14, 15, 31),
            9,
            "leaked",
            A,
            "step 104: decode for c4f7a6b8, schedule_batch.py:2013 alloc_for_decode",
            "step 118: cache_finished_req of c4f7a6b8 freed 26 of its 35 pages",
            118,
        ),
        Holding("swa", (7,), 1, "double", B, "step 117: free", "step 112: free by _evict_swa", 112),
        Holding("full", (1, 2, 3), 3, "cached", "", "", "", 101),
    )
    events = (
        PageEvent(101, "alloc", "full", (12, 13), 2, A, "mem_cache/common.py:212 alloc_paged"),
        PageEvent(104, "decode", "full", (12,), 1, A, "schedule_batch.py:2013 alloc_for_decode"),
    )
    finding = Finding(
        check="pool-leak",
        kind="leaked",
        site="scheduler.idle",
        headline="g4debug: pool-leak: 9 pages of the full pool are held by nobody",
        location=_at(step=120, forward_mode=""),
        expected="free + cached + live = 71 pages of the full pool",
        got="48 + 3 + 11 = 62",
        owner=f"request {A}, finished at step 118",
    )
    return _record(finding, holdings=holdings, events=events)


def crash() -> TrapRecord:
    """Flight recorder: the device is gone, host memory alone."""
    finding = Finding(
        check="flight-recorder",
        kind="cuda-error",
        site="worker.forward",
        headline="g4debug: flight-recorder: CUDA error: an illegal memory access was encountered",
        location=_at(),
        expected="a step that completes",
        got="torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
        "CUDA kernel errors might be asynchronously reported at some other API call",
    )
    steps = tuple(
        dataclasses.replace(s, time_ns=1_780_283_655_000_000_000 + i * 20_700_000, waiting=i // 4)
        for i, s in enumerate(sample_steps())
    )
    return _record(finding, allocator=evicted().allocator, steps=steps)


def device_assert() -> TrapRecord:
    """Flight recorder: an assertion in a kernel, on a draft with one rank's part of the table."""
    found = DeviceAssert(
        "srcIndex < srcSelectDimSize",
        "ATen/native/cuda/Indexing.cu",
        1141,
        "indexSelectLargeIndex",
        "3,0,0",
        "64,0,0",
        512,
    )
    ids = ("token ids", ("embedding",))
    draft = "the draft's token embedding"
    place = "models/gemma4_mtp.py"
    why = (
        "token ids 0 to 262,143 do not fit 131,072 rows; it was given the part of the vocabulary "
        "of TP rank 0 of 2, not the whole; the vocabulary has 262,144 tokens, and the draft gets "
        "ids of all of them"
    )
    fits = "token ids 0 to 262,143 would fit 262,144 rows, but the device made them"
    sort = "Indexing.cu:1141 indexSelectLargeIndex is an embedding or index_select, and this is "
    finding = Finding(
        check="flight-recorder",
        kind="device-assert",
        site="scheduler.init",
        headline="g4debug: flight-recorder in start-up: an index was out of range in a kernel "
        "(device-side assert `srcIndex < srcSelectDimSize`, Indexing.cu:1141 "
        "indexSelectLargeIndex)",
        location=_at(step=-1, forward_mode=""),
        expected="a scheduler that keeps running",
        got="AcceleratorError in torch/_dynamo/eval_frame.py:1 _fn. This is only where it "
        "surfaced: the next call that waits for the device reports a CUDA error, but the kernel "
        "that failed was launched earlier\n512 threads printed: `srcIndex < srcSelectDimSize` "
        "(Indexing.cu:1141 indexSelectLargeIndex). Other ranks print to the same file, so some of "
        "it may be theirs",
        cause=f"Of the lookups in LOOKUPS, only {draft} ({place}) has indices that do not fit its "
        f"table: {why}.",
        reference="TRIAGE.md, 'Device-side assert triggered'",
    )
    some = (
        Lookup(draft, place, *ids, 131_072, 0, 262_143, verdict="could", why=why),
        Lookup(
            "the target's token embedding",
            "models/gemma4_causal.py",
            *ids,
            262_144,
            0,
            262_143,
            verdict="not known",
            why=fits,
        ),
        Lookup(
            "req_to_token",
            "mem_cache/memory_pool.py",
            "req_pool_indices",
            ("index",),
            4097,
            verdict="cannot",
            why=f"{sort}tensor[index]",
        ),
    )
    return _record(finding, asserts=(found,), lookups=some, steps=())


KINDS = {
    "evicted": evicted,
    "typestate": wrong_typestate,
    "leak": leak,
    "crash": crash,
    "assert": device_assert,
}
