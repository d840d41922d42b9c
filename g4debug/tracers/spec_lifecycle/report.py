"""Turns a wrong hand-over of ``batch.spec_info`` into a Finding. Runs only if there is one."""

from __future__ import annotations

import os
from collections.abc import Callable

from g4debug.findings.record import Finding, Location
from g4debug.findings.steps import Recorder
from g4debug.fixes import draft_embedding_shard as shard
from g4debug.fixes import hybrid_pool_swap as hybrid
from g4debug.hooking import targets
from g4debug.tracers.spec_lifecycle import causes
from g4debug.tracers.spec_lifecycle.check import Kind, Violation
from g4debug.tracers.spec_lifecycle.hand_over import HandOver

LAUNCH = "<your launch command>"
DOUBLE = "seed PR #24 (double bookkeeping); "
EAGER = f"{LAUNCH} --disable-cuda-graph"  # tells whether a CUDA graph has to do with it
_LEFT = "TRIAGE.md, 'AttributeError in merge_batch (FROZEN_KV_MTP)'"
_STEP = "TRIAGE.md, 'Speculative decoding: what a step leaves is wrong'"
_EMBEDDING = "TRIAGE.md, 'MTP with tensor parallelism: the draft has only a part of the embedding'"
_POOL = "TRIAGE.md, 'IndexError with split attention backends and MTP'"
REFERENCES: dict[Kind, str] = {
    "verify-input-left": _LEFT,
    "spec-info-dropped": _STEP,
    "wrong-type": _STEP,
    "wrong-shape": _STEP,
    "accept-length": _STEP,
    "seq-len": _STEP,
    "bookkeeping": _STEP,
    "stale-hidden-state": _STEP,
    "future-row": _STEP,
    "publish-order": _STEP,
    "bonus-token": _STEP,
    "allocated-len": _STEP,
    "draft-embedding": _EMBEDDING,
    "draft-pool": _POOL,
    "draft-places": _STEP,
}


_RUNNERS = {
    "worker.target_extend": "target",
    "worker.verify": "target",
    "worker.draft": "draft",
    "worker.draft_forward": "draft",
    "worker.seed_step": "draft",
    "worker.draft_extend": "draft",
    "draft.bind_embedding": "draft",
    "attn.hybrid_metadata": "draft",
}


def describe(violation: Violation, at: HandOver, recorder: Recorder) -> Finding:
    """The finding. Reads nothing but host memory."""
    rid = at.rids[violation.row] if 0 <= violation.row < len(at.rids) else ""
    mode = getattr(getattr(at.batch, "forward_mode", None), "name", "")
    fix, command = _explain(violation)
    about = f" for request {rid} (row {violation.row})" if rid else ""
    says = _SAYS[violation.kind](violation, about)
    return Finding(
        check="spec-lifecycle",
        kind=violation.kind,
        site=at.site,
        headline=f"g4debug: spec-lifecycle in {at.label}: {says}",
        location=Location(
            process="scheduler",
            pid=os.getpid(),
            rank=recorder.rank,
            step=at.step or recorder.step,
            forward_mode=mode,
            runner=_RUNNERS.get(at.site, ""),
            request=rid,
            row=violation.row,
        ),
        expected=violation.expected,
        got=violation.got,
        cause=causes.cause(violation, at),
        reference=fix + REFERENCES[violation.kind],
        next_command=command,
    )


def _off(p: Violation, about: str) -> str:
    expected = p.expected.rpartition(" = ")[2].removeprefix("an accept length of ")
    return f"{p.got}{about}, should be {expected}"


def _state(p: Violation, about: str) -> str:
    return f"batch.spec_info is {_article(p.got)}, not {_article(p.expected)}"


def _article(what: str) -> str:
    return what if what == "None" or what.startswith(("another", "the ")) else f"a {what}"


_SAYS: dict[Kind, Callable[[Violation, str], str]] = {
    "verify-input-left": _state,
    "spec-info-dropped": _state,
    "wrong-type": _state,
    "wrong-shape": lambda p, about: f"{p.got}, should have {p.expected}",
    "accept-length": _off,
    "seq-len": _off,
    "bookkeeping": _off,
    "stale-hidden-state": lambda p, about: f"the hidden states are {p.got}, not {p.expected}",
    "future-row": lambda p, about: f"{p.got}{about}, expected {p.expected}",
    "publish-order": lambda p, about: f"{p.got}, expected {p.expected}",
    "bonus-token": lambda p, about: f"the draft goes on from {p.got}{about}, not {p.expected}",
    "allocated-len": lambda p, about: f"{p.got}{about}, should be {_least(p)}",
    "draft-embedding": lambda p, about: (
        f"the draft looks tokens up in {p.got}, and the vocabulary has {-p.off} tokens more"
    ),
    "draft-pool": lambda p, about: (
        f"the draft's {p.what} is to read {p.expected}, and computes on {p.got}"
    ),
    "draft-places": lambda p, about: f"the draft's forward has {p.got}, expected {p.expected}",
}


def _least(p: Violation) -> str:
    return p.expected.removeprefix("kv_allocated_len of ")


def _explain(violation: Violation) -> tuple[str, str]:
    """(the fix that matches, as a prefix of the reference, next command).

    Without overlap scheduling 0.5.23 does not serve at all.
    """
    kind = violation.kind
    if kind == "draft-embedding" and shard.FIX.is_for_this_release:
        return f"fix {shard.ID}; ", f"G4DEBUG_FIX_DRAFT_EMBEDDING_SHARD=1 {LAUNCH}"
    if kind == "draft-pool":
        return f"fix {hybrid.ID}; ", f"G4DEBUG_FIX_HYBRID_POOL_SWAP=1 {LAUNCH}"
    if kind == "bookkeeping":
        return DOUBLE, "g4debug doctor"
    if kind == "draft-places" and not targets.clears_draft_places():
        return "sglang #29616 (in 0.5.15.post1); ", "g4debug doctor"
    if kind in ("stale-hidden-state", "accept-length", "bonus-token", "seq-len"):
        return "", EAGER
    return "", "g4debug doctor"
