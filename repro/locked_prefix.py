"""SGLang frees cached pages while a request still reads them, and its answer is silently wrong.

No fault is injected: this is SGLang 0.5.12.post1 to 0.5.14 as released. It takes a system prompt
that many requests share, one long answer, and a SWA pool that is nearly full. The script runs on
the CPU engine only.
"""

from __future__ import annotations

import random

from harness.processes import Outcome
from harness.variants import CPU_ONLY, Repro, Variant, diagnosed, main
from harness.verdicts import Bad, compared, completed, judge, same_outputs, told
from harness.workload import Workload, each

OFF = {"G4DEBUG_FIX_LOCKED_PREFIX": "0"}


@judge
def judge_clean(run: Outcome) -> str:
    completed(run)
    return f"It completes all {len(run.result['tokens'])} requests."


@compared
def judge_broken(run: Outcome, clean: Outcome) -> str:
    pairs = list(zip(run.result["tokens"], clean.result["tokens"], strict=True))
    wrong = [i for i, (a, b) in enumerate(pairs) if a != b]
    if not wrong:
        raise Bad("It completes, and all answers are right: the bug was not met.")
    first = next(n for n, (a, b) in enumerate(zip(*pairs[wrong[0]], strict=True)) if a != b)
    return (
        f"It completes and reports nothing, but {len(wrong)} of {len(pairs)} answers are wrong. "
        f"The answer to request {wrong[0]} is wrong from its token {first} on."
    )


@judge
def judge_diagnosed(run: Outcome) -> str:
    record = told(run)
    finding = record.finding
    if finding.kind != "freed-while-read":
        raise Bad(f"It stops with another finding: {finding.headline}.")
    who = [e for e in record.events if e.kind == "free"]
    if not who or "_insert_helper" not in who[-1].caller:
        raise Bad(f"The finding does not say who frees the page: {finding.headline}.")
    return (
        f"g4debug stops it. The tracer {finding.check} reports {finding.kind}, before the page is "
        f"free, and names who frees it: {who[-1].caller}."
    )


PREFIX, OWN = 256, 192  # tokens; the toy model's window is 128
LONG, SHORT = 160, 3  # tokens of an answer


class Shared(Workload):
    """The first two requests, and later every third one, start with the same prefix.

    The first two put it into the cache. The second one writes a long answer and so keeps the prefix
    locked. Others fill the SWA pool until the cache drops the SWA half of the prefix, and then
    another request computes the same prefix again.
    """

    def prompts(self, seed: int = 0) -> list[list[int]]:
        """Token ids; the same for the same seed."""
        rng = random.Random(seed)

        def tokens(n: int) -> list[int]:
            return [rng.randrange(4, self.vocab) for _ in range(n)]

        prefix = [2, *tokens(PREFIX - 1)]
        found = [prefix + tokens(OWN), prefix + tokens(OWN)]
        while len(found) < self.requests:
            shared = len(found) % 3 == 0
            found.append((prefix if shared else [2, *tokens(PREFIX - 1)]) + tokens(64))
        return found


def cpu(requests: int | None) -> Workload:
    """A tiny E4B-shaped model on torch stand-ins; real SGLang otherwise."""
    count = max(4, requests or 24)
    return Shared.toy(
        count,
        (PREFIX + 64, PREFIX + OWN),
        [SHORT, LONG, *[SHORT] * (count - 2)],
        decode_log_interval=1,
        max_total_tokens=4096,
        swa_full_tokens_ratio=0.3,
        max_running_requests=2,
        chunked_prefill_size=512,
    )


DEVICES = {"cpu": cpu}
# Without the prefix cache there is nothing to share: these are the right answers.
UNCACHED = each(DEVICES, disable_radix_cache=True)


REPRO = Repro(
    name="locked_prefix",
    serves="a shared prefix, one long answer, a SWA pool that is nearly full",
    refuses=", on a machine with a GPU or on SGLang 0.5.15 and later",
    variants={
        "clean": Variant("without a prefix cache, the fix is off", OFF, judge_clean, "UNCACHED"),
        "broken": Variant("the fix is off, debugging is off", OFF, judge_broken),
        "diagnosed": diagnosed("the fix is off, debugging is on", OFF, judge_diagnosed),
        "fixed": Variant("the fix locked-prefix is on", {}, same_outputs),
    },
    releases="<0.5.15",
    elsewhere=CPU_ONLY,
)

if __name__ == "__main__":
    raise SystemExit(main(REPRO, __doc__, "24"))
