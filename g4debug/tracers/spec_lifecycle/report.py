"""Turns a wrong hand-over of ``batch.spec_info`` into a Finding. Runs only if there is one."""

from __future__ import annotations

from g4debug.findings.kinds import KINDS, LAUNCH, FindingKind
from g4debug.findings.record import Finding, Location
from g4debug.findings.steps import Recorder
from g4debug.fixes import draft_embedding_shard as shard
from g4debug.fixes import hybrid_pool_swap as hybrid
from g4debug.hooking import req_kv, targets
from g4debug.tracers.spec_lifecycle import causes
from g4debug.tracers.spec_lifecycle.check import Violation
from g4debug.tracers.spec_lifecycle.hand_over import HandOver

DOUBLE = "two places count what one step gave (double bookkeeping); "


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
    record = KINDS["spec-lifecycle"][violation.kind]
    fix, command = _explain(record, violation)
    about = f" for request {rid} (row {violation.row})" if rid else ""
    return record.finding(
        site=at.site,
        headline=f"g4debug: spec-lifecycle in {at.label}: {_says(record, violation, about)}",
        location=Location(
            process="scheduler",
            rank=recorder.rank,
            step=at.step or recorder.step,
            forward_mode=mode,
            runner=_RUNNERS.get(at.site, ""),
            request=rid,
            row=violation.row,
            column=violation.column,
        ),
        expected=violation.expected,
        got=violation.got,
        cause=causes.cause(violation, at),
        reference=fix + record.reference,
        next_command=command,
    )


def _says(record: FindingKind, p: Violation, about: str) -> str:
    """The end of the headline."""
    return record.what.format(
        got=p.got,
        expected=p.expected,
        what=p.what,
        about=about,
        a_got=_article(p.got),
        a_expected=_article(p.expected),
        number=p.expected.rpartition(" = ")[2].removeprefix("an accept length of "),
        least=p.expected.removeprefix("kv_allocated_len of "),
        missing=-p.off,
    )


def _article(what: str) -> str:
    return what if what == "None" or what.startswith(("another", "the ")) else f"a {what}"


def _explain(record: FindingKind, violation: Violation) -> tuple[str, str]:
    """(the fix that matches, as a prefix of the reference, next command)."""
    kind = record.name
    if kind == "draft-embedding" and shard.FIX.is_for_this_release:
        return f"fix {shard.ID}; ", f"G4DEBUG_FIX_DRAFT_EMBEDDING_SHARD=1 {LAUNCH}"
    if kind == "draft-pool":
        return f"fix {hybrid.ID}; ", record.command
    if kind == "bookkeeping" and violation.what != req_kv.ROW and not violation.ends[0]:
        return DOUBLE, record.command
    if kind == "draft-places" and not targets.clears_draft_places():
        return "sglang #29616 (in 0.5.15.post1); ", record.command
    return "", record.command
