"""FROZEN_KV_MTP dies when a batch in which every request has finished is merged with a prefill.

    python repro/zero_accept_merge.py [--device cpu|cuda] [--variant NAME] [--requests N] [--json]
                                      [--keep]

No fault is injected: this is SGLang 0.5.12.post1 as released. The KV pool holds one request, so the
next one waits. When the running request finishes in a verify, the next one is prefilled and merged
into the batch, which is now empty. That is called a hand-over here. Each variant is one engine that
serves 201 requests, which makes 200 hand-overs.

The exit code is 0 if every variant did what it should, 1 if one did not, and 2 for wrong
arguments or on SGLang 0.5.13 and later.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _run import Outcome
from _variants import (
    DEBUG,
    Repro,
    Variant,
    Verdict,
    blamed,
    died_otherwise,
    dump_of,
    headline_first,
    main,
    no_dump,
    not_completed,
    not_named,
    same_outputs,
)
from _zero_accept import DEVICES

ERROR = "AttributeError: 'FrozenKVMTPVerifyInput' object has no attribute 'merge_batch'"
IDLE_OFF = {"G4DEBUG_FIX_IDLE_DRAFT_INPUT": "0"}
GUARDS_OFF = {"G4DEBUG_FIX_SPEC_BATCH_GUARDS": "0"}
# A prefill is admitted while a batch that has drained still counts as running.
_HAND_OVER = re.compile(r"Prefill batch, .*#running-req: [1-9]")


def hand_overs(run: Outcome) -> int:
    return len(_HAND_OVER.findall(run.text))


def judge_clean(run: Outcome, clean: Outcome | None) -> Verdict:
    if not run.completed:
        return Verdict(False, not_completed(run))
    if hand_overs(run):
        return Verdict(
            False,
            f"It completes, but there were {hand_overs(run)} hand-overs. There should be none.",
        )
    return Verdict(
        True, f"It completes all {len(run.result['tokens'])} requests, without a hand-over."
    )


def judge_broken(run: Outcome, clean: Outcome | None) -> Verdict:
    if run.completed:
        return Verdict(False, f"It completes {hand_overs(run)} hand-overs: the bug is not there.")
    if ERROR not in run.text:
        return Verdict(False, died_otherwise(run, ERROR))
    return Verdict(
        True, f"It dies at hand-over {hand_overs(run)}: AttributeError in {blamed(run)}."
    )


def judge_diagnosed(run: Outcome, clean: Outcome | None) -> Verdict:
    record = dump_of(run)
    if record is None:
        return no_dump(run)
    finding = record.finding
    wanted = {
        "spec-lifecycle": finding.check == "spec-lifecycle",
        "the type that was left": "FrozenKVMTPVerifyInput" in finding.headline,
        "the merge": "merge" in finding.headline,
        "who left it": "finished in the verify of step" in finding.cause,
        "the headline before SGLang's own words": headline_first(run, finding.headline),
        "what happened before": bool(record.transitions),
    }
    missing = [name for name, found in wanted.items() if not found]
    if missing:
        return not_named(missing)
    if ERROR in run.text:
        return Verdict(False, "g4debug reports the finding, but SGLang's AttributeError came, too.")
    return Verdict(
        True,
        f"g4debug stops it before the merge, at hand-over {hand_overs(run)}, with a finding of the "
        "tracer spec-lifecycle.",
    )


def judge_fixed(run: Outcome, clean: Outcome | None) -> Verdict:
    verdict = same_outputs(run, clean)
    if not verdict.good:
        return verdict
    done, wanted = hand_overs(run), len(run.result["tokens"]) - 1
    return Verdict(done == wanted, f"There are {done} of {wanted} hand-overs. {verdict.what}")


WAITING, ALONE = "_zero_accept", "_zero_accept:ALONE"
REPRO = Repro(
    title="zero_accept_merge: Gemma-4 E4B's shape, FROZEN_KV_MTP, a pool for one request",
    variants={
        "clean": Variant(
            "one request at a time (--max-running-requests 1), both fixes are off",
            {**IDLE_OFF, **GUARDS_OFF},
            judge_clean,
            ALONE,
        ),
        "broken": Variant(
            "requests wait, both fixes are off",
            {**IDLE_OFF, **GUARDS_OFF},
            judge_broken,
            WAITING,
            "traceback",
        ),
        "diagnosed": Variant(
            "requests wait, both fixes are off, debugging is on",
            {**IDLE_OFF, **GUARDS_OFF, **DEBUG},
            judge_diagnosed,
            WAITING,
            "finding",
        ),
        "guarded": Variant(
            "requests wait, only the fix spec-batch-guards is on", IDLE_OFF, judge_fixed, WAITING
        ),
        "fixed": Variant(
            "requests wait, only the fix idle-draft-input is on", GUARDS_OFF, judge_fixed, WAITING
        ),
    },
    devices=DEVICES,
    releases="<0.5.13",
    compares=("guarded", "fixed"),
)

if __name__ == "__main__":
    sys.exit(main(REPRO, __doc__ or "", "201, which make 200 hand-overs"))
