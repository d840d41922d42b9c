"""A batch in which every request finished is merged with a prefill: FROZEN_KV_MTP's natural crash.

    python repro/zero_accept_merge.py [--device cpu|cuda] [--arm NAME] [--requests N] [--json]

No fault is injected: SGLang 0.5.12.post1 as installed dies. One *run* is one hand-over: a batch of
one request drains in a verify while the next request waits for its KV, and the prefill of that one
is merged into it. An arm is one engine and 201 requests, so 200 runs. Exit code 0 only if every
arm did as it should, 1 if one did not, 2 for wrong arguments.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _arms import DEBUG, Arm, Repro, Verdict, blamed, dump_of, headline_first, main, same_outputs
from _run import Outcome
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
        return Verdict(False, f"did not complete (status {run.status}); log: {run.log}")
    if hand_overs(run):
        return Verdict(False, f"{hand_overs(run)} hand-overs, expected none")
    return Verdict(True, f"completes {len(run.result['tokens'])} requests, no hand-over")


def judge_broken(run: Outcome, clean: Outcome | None) -> Verdict:
    if run.completed:
        return Verdict(False, f"completed {hand_overs(run)} hand-overs: the bug is not there")
    if ERROR not in run.text:
        return Verdict(False, f"died of something else (status {run.status}); log: {run.log}")
    return Verdict(True, f"dies at hand-over {hand_overs(run)}: AttributeError in {blamed(run)}")


def judge_diagnosed(run: Outcome, clean: Outcome | None) -> Verdict:
    record = dump_of(run)
    if record is None:
        return Verdict(False, f"no dump (status {run.status}); log: {run.log}")
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
        return Verdict(False, f"the finding does not name {', '.join(missing)}")
    if ERROR in run.text:
        return Verdict(False, "the finding came, but SGLang's AttributeError, too")
    return Verdict(True, f"stops before the merge, at hand-over {hand_overs(run)}: spec-lifecycle")


def judge_fixed(run: Outcome, clean: Outcome | None) -> Verdict:
    verdict = same_outputs(run, clean)
    if not verdict.good:
        return verdict
    done, wanted = hand_overs(run), len(run.result["tokens"]) - 1
    return Verdict(done == wanted, f"{done} of {wanted} hand-overs; {verdict.what}")


WAITING, ALONE = "_zero_accept", "_zero_accept:ALONE"
REPRO = Repro(
    title="zero_accept_merge: Gemma-4 E4B shape, FROZEN_KV_MTP, the pool holds one request",
    arms={
        "clean": Arm(
            "max_running_requests=1, fixes off",
            {**IDLE_OFF, **GUARDS_OFF},
            judge_clean,
            ALONE,
        ),
        "broken": Arm(
            "requests wait, fixes off",
            {**IDLE_OFF, **GUARDS_OFF},
            judge_broken,
            WAITING,
            "traceback",
        ),
        "diagnosed": Arm(
            "the same, debug on",
            {**IDLE_OFF, **GUARDS_OFF, **DEBUG},
            judge_diagnosed,
            WAITING,
            "finding",
        ),
        "guarded": Arm(
            "requests wait, fix spec-batch-guards alone", IDLE_OFF, judge_fixed, WAITING
        ),
        "fixed": Arm("requests wait, fix idle-draft-input alone", GUARDS_OFF, judge_fixed, WAITING),
    },
    devices=DEVICES,
    compares=("guarded", "fixed"),
)

if __name__ == "__main__":
    sys.exit(main(REPRO, __doc__ or "", "201, which are 200 hand-overs"))
