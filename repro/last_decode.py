"""SGLang ends the only request of a server with HTTP 500, because its own prompt fills the pool.

No fault is injected: this is SGLang as released, 0.5.12 to 0.5.15. It takes one request: a prompt
that nearly fills the SWA pool, and an answer of more than a page. The prefix cache has the prompt
as one node, which the request has locked whole, far behind its window. The script runs on the CPU
engine only.
"""

from __future__ import annotations

from harness.processes import Outcome
from harness.stand_still import ENGINE, POOL, with_room
from harness.variants import CPU_ONLY, Repro, Variant, broken, diagnosed, main
from harness.verdicts import Bad, answers, died_otherwise, dump_path, judge, same_outputs
from harness.workload import Workload

from g4debug.settings import fix_switch

PROMPT, ANSWER = 701, 70  # tokens
KILLED = "Out of memory even after retracting all other requests in the decode batch"
OFF = {fix_switch("last-decode"): "0"}


def ended(run: Outcome) -> str:
    """What a user sees. Raises Bad if the request is served, or ends otherwise."""
    if run.completed or KILLED not in run.text:
        raise Bad(died_otherwise(run, KILLED))
    return f"Its request ends with HTTP 500, on a server that serves nobody else: {KILLED}."


@judge
def judge_broken(run: Outcome) -> str:
    return ended(run)


@judge
def judge_diagnosed(run: Outcome) -> str:
    seen = ended(run)
    if path := dump_path(run):
        raise Bad(f"A tracer has a finding, though nothing is corrupted: {path}.")
    return (
        f"{seen} No tracer has a finding, because nothing is corrupted. TRIAGE.md has the message."
    )


def cpu(requests: int | None) -> Workload:
    """A tiny E4B-shaped model on torch stand-ins; real SGLang otherwise."""
    return Workload.toy(1, (PROMPT, PROMPT), ANSWER, chunked_prefill_size=1024, **ENGINE)


DEVICES = {"cpu": cpu}
ROOMY = with_room(DEVICES)
REPRO = Repro(
    name="last_decode",
    serves=f"a prompt of {PROMPT} tokens, an answer of {ANSWER}, a SWA pool of {POOL}",
    refuses=", on a machine with a GPU or on SGLang 0.5.18 and later",
    variants={
        "clean": Variant("a SWA pool of 6528 tokens, the fix is off", OFF, answers, "ROOMY"),
        "broken": broken("the fix is off, debugging is off", OFF, judge_broken),
        "diagnosed": diagnosed("the fix is off, debugging is on", OFF, judge_diagnosed),
        "fixed": Variant("the fix last-decode is on", {}, same_outputs),
    },
    releases="<0.5.18",
    elsewhere=CPU_ONLY,
)

if __name__ == "__main__":
    raise SystemExit(main(REPRO, __doc__, ""))
