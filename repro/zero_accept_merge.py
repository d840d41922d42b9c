"""FROZEN_KV_MTP dies when a batch in which every request has finished is merged with a prefill.

No fault is injected: this is SGLang 0.5.12.post1 as released. The KV pool holds one request, so the
next one waits. When the running request finishes in a verify, the next one is prefilled and merged
into the batch, which is now empty. That is called a hand-over here. Each variant is one engine that
serves 201 requests, which makes 200 hand-overs.
"""

from __future__ import annotations

import re

from harness import verdicts
from harness.processes import Outcome
from harness.variants import Repro, Variant, broken, diagnosed, main
from harness.workload import Workload, each
from workloads import e4b_trtllm_mtp

ERROR = "AttributeError: 'FrozenKVMTPVerifyInput' object has no attribute 'merge_batch'"
IDLE_OFF = {"G4DEBUG_FIX_IDLE_DRAFT_INPUT": "0"}
GUARDS_OFF = {"G4DEBUG_FIX_SPEC_BATCH_GUARDS": "0"}
BOTH_OFF = {**IDLE_OFF, **GUARDS_OFF}
# A prefill is admitted while a batch that has drained still counts as running.
_HAND_OVER = re.compile(r"Prefill batch, .*#running-req: [1-9]")


def hand_overs(run: Outcome) -> int:
    return len(_HAND_OVER.findall(run.text))


@verdicts.judge
def judge_clean(run: Outcome) -> str:
    verdicts.completed(run)
    if done := hand_overs(run):
        raise verdicts.Bad(f"It completes, but there were {done} hand-overs. There should be none.")
    return f"It completes all {len(run.result['tokens'])} requests, without a hand-over."


@verdicts.judge
def judge_broken(run: Outcome) -> str:
    if run.completed:
        raise verdicts.Bad(f"It completes {hand_overs(run)} hand-overs: the bug is not there.")
    if ERROR not in run.text:
        raise verdicts.Bad(verdicts.died_otherwise(run, ERROR))
    return f"It dies at hand-over {hand_overs(run)}: AttributeError in {verdicts.blamed(run)}."


@verdicts.judge
def judge_diagnosed(run: Outcome) -> str:
    record = verdicts.told(run)
    finding = record.finding
    wanted = {
        "spec-lifecycle": finding.check == "spec-lifecycle",
        "the type that was left": "FrozenKVMTPVerifyInput" in finding.headline,
        "the merge": "merge" in finding.headline,
        "who left it": "finished in the verify of step" in finding.cause,
        "what happened before": bool(record.transitions),
    }
    verdicts.must_name(run, finding, wanted)
    if ERROR in run.text:
        raise verdicts.Bad("g4debug reports the finding, but SGLang's AttributeError came, too.")
    return (
        f"g4debug stops it before the merge, at hand-over {hand_overs(run)}, with a finding of the "
        "tracer spec-lifecycle."
    )


@verdicts.compared
def judge_fixed(run: Outcome, clean: Outcome) -> str:
    what = verdicts.equal_outputs(run, clean)
    done, wanted = hand_overs(run), len(run.result["tokens"]) - 1
    return verdicts.only_if(done == wanted, f"There are {done} of {wanted} hand-overs. {what}")


REQUESTS = 201  # one more than there are hand-overs


def cpu(requests: int | None) -> Workload:
    """A tiny E4B-shaped model on torch stand-ins; real SGLang otherwise."""
    return Workload.toy(
        requests or REQUESTS,
        (300, 300),
        8,
        decode_log_interval=1,
        max_total_tokens=512,  # one request of 300 + 8 tokens, not two
        max_running_requests=8,
        chunked_prefill_size=512,
        disable_radix_cache=True,
    )


def cuda(requests: int | None) -> Workload:
    """The demo's geometry, with pools that hold one request at a time."""
    other = e4b_trtllm_mtp.cuda(8).given(
        max_total_tokens=64 * 40, swa_full_tokens_ratio=0.8, chunked_prefill_size=2048
    )
    count = requests or REQUESTS
    return Workload(count, (1500, 1500), 8, other.vocab, other.engine, timeout=400)


DEVICES = {"cpu": cpu, "cuda": cuda}
# If only one request may run, SGLang admits the next one after it has filtered the empty batch.
# (To send each request after the end of the one before is not enough: it may come too early.)
ALONE = each(DEVICES, max_running_requests=1)


REPRO = Repro(
    name="zero_accept_merge",
    serves="Gemma-4 E4B's shape, FROZEN_KV_MTP, a pool for one request",
    refuses=" or on SGLang 0.5.13 and later",
    variants={
        "clean": Variant(
            "one request at a time (--max-running-requests 1), both fixes are off",
            BOTH_OFF,
            judge_clean,
            "ALONE",
        ),
        "broken": broken("requests wait, both fixes are off", BOTH_OFF, judge_broken),
        "diagnosed": diagnosed(
            "requests wait, both fixes are off, debugging is on", BOTH_OFF, judge_diagnosed
        ),
        "guarded": Variant(
            "requests wait, only the fix spec-batch-guards is on", IDLE_OFF, judge_fixed
        ),
        "fixed": Variant(
            "requests wait, only the fix idle-draft-input is on", GUARDS_OFF, judge_fixed
        ),
    },
    releases="<0.5.13",
)

if __name__ == "__main__":
    raise SystemExit(main(REPRO, __doc__, "201, which make 200 hand-overs"))
