"""SGLang ends a decoding request with HTTP 500, because a prompt between two chunks has the pool.

No fault is injected: this is SGLang as released, 0.5.12 to 0.5.15 (reported in the manner of sglang
#28246: killed although most of the memory is free). It takes a SWA pool that is smaller than two
prefill chunks, no prefix cache, a request that decodes, and prompts of more than two chunks behind
it. The script runs on the CPU engine only.
"""

from __future__ import annotations

import random

from harness.processes import Outcome
from harness.stand_still import ENGINE, POOL, with_room
from harness.variants import CPU_ONLY, Repro, Variant, broken, diagnosed, main
from harness.verdicts import Bad, answers, died_otherwise, dump_path, judge, same_outputs
from harness.workload import Workload

from g4debug.settings import fix_switch

DECODES, ANSWER = 60, 400  # tokens of the request that decodes
LONG, SHORT_ANSWER = 1500, 8  # tokens of the prompts behind it
CHUNK = 512  # tokens of a prefill chunk
KILLED = "Out of memory even after retracting all other requests in the decode batch"
OFF = {fix_switch("parked-chunk"): "0"}


def ended(run: Outcome) -> str:
    """What a user sees. Raises Bad if all are served, or the request ends otherwise."""
    if run.completed or KILLED not in run.text:
        raise Bad(died_otherwise(run, KILLED))
    return f"The request that decodes ends with HTTP 500, while a prompt waits: {KILLED}."


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


class DecodesFirst(Workload):
    """The first request decodes for long. The others come with it, and have long prompts."""

    def prompts(self, seed: int = 0) -> list[list[int]]:
        rng = random.Random(seed)
        lengths = [DECODES, *[LONG] * (self.requests - 1)]
        return [[2, *(rng.randrange(4, self.vocab) for _ in range(n - 1))] for n in lengths]


def cpu(requests: int | None) -> Workload:
    """A tiny E4B-shaped model on torch stand-ins; real SGLang otherwise."""
    requests = requests or 3
    return DecodesFirst.toy(
        requests,
        (DECODES, LONG),
        [ANSWER, *[SHORT_ANSWER] * (requests - 1)],
        disable_radix_cache=True,
        chunked_prefill_size=CHUNK,
        **ENGINE,
    )


DEVICES = {"cpu": cpu}
ROOMY = with_room(DEVICES)
REPRO = Repro(
    name="parked_decode",
    serves=f"an answer of {ANSWER} tokens, prompts of {LONG} in chunks of {CHUNK}, "
    f"a SWA pool of {POOL}",
    refuses=", on a machine with a GPU or on SGLang 0.5.18 and later",
    variants={
        "clean": Variant("a SWA pool of 6528 tokens, the fix is off", OFF, answers, "ROOMY"),
        "broken": broken("the fix is off, debugging is off", OFF, judge_broken),
        "diagnosed": diagnosed("the fix is off, debugging is on", OFF, judge_diagnosed),
        "fixed": Variant("the fix parked-chunk is on", {}, same_outputs),
    },
    releases="<0.5.18",
    elsewhere=CPU_ONLY,
)

if __name__ == "__main__":
    raise SystemExit(main(REPRO, __doc__, "3"))
