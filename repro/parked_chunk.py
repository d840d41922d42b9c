"""SGLang serves nobody any more: a prompt waits for room that it holds itself.

No fault is injected: this is SGLang as released, 0.5.12 to 0.5.23. It takes a SWA pool that is
smaller than two prefill chunks, no prefix cache, and one prompt of more than two chunks. Nothing
is logged, and the server's health stays good. The script runs on the CPU engine only.
"""

from __future__ import annotations

import random

from harness.processes import Outcome
from harness.standing import PATIENCE
from harness.variants import CPU_ONLY, Repro, Variant, diagnosed, main
from harness.verdicts import Bad, completed, judge, only_if, same_outputs, told
from harness.workload import Workload, each

OFF = {"G4DEBUG_FIX_PARKED_CHUNK": "0"}
HANG_SECONDS = 10
LONG, SHORT = 1600, 200  # tokens of the first prompt, and of those that come with it
CHUNK, POOL = 512, 768  # tokens of a prefill chunk and of the SWA pool


@judge
def judge_clean(run: Outcome) -> str:
    completed(run)
    return only_if(
        not run.result["unserved"], f"It serves all {len(run.result['tokens'])} requests."
    )


def stands(run: Outcome) -> str:
    """What a user sees. Raises Bad unless nobody is served while the scheduler goes on."""
    completed(run)
    found = run.result
    if found["unserved"] < len(found["tokens"]):
        raise Bad(f"It serves {len(found['tokens']) - found['unserved']} requests.")
    if not found["turns"]:
        raise Bad("Its scheduler does not answer any more: that is another bug.")
    return (
        f"It stands: none of {found['unserved']} requests is served within {PATIENCE:.0f} s, and "
        "its scheduler goes on as if nothing were wrong."
    )


@judge
def judge_broken(run: Outcome) -> str:
    return stands(run)


@judge
def judge_diagnosed(run: Outcome) -> str:
    seen = stands(run)
    finding = told(run).finding
    if finding.kind != "hang":
        raise Bad(f"It tells another finding: {finding.headline}.")
    if "SWA" not in finding.got or "deadlock" not in finding.cause:
        raise Bad(f"The finding does not say why: {finding.got} {finding.cause}")
    return f"{seen} g4debug tells it by itself, and why: {finding.cause}"


class LongFirst(Workload):
    """The first prompt is ``LONG``. The others come with it, and are ``SHORT``."""

    def prompts(self, seed: int = 0) -> list[list[int]]:
        rng = random.Random(seed)
        lengths = [LONG, *[SHORT] * (self.requests - 1)]
        return [[2, *(rng.randrange(4, self.vocab) for _ in range(n - 1))] for n in lengths]


def cpu(requests: int | None) -> Workload:
    """A tiny E4B-shaped model on torch stand-ins; real SGLang otherwise."""
    return LongFirst.toy(
        requests or 3,
        (SHORT, LONG),
        8,
        mtp=False,
        disable_radix_cache=True,
        max_running_requests=None,  # 0.5.23 makes the SWA pool larger if it is given
        max_total_tokens=8192,
        swa_full_tokens_ratio=0.1,
        chunked_prefill_size=CHUNK,
    )


DEVICES = {"cpu": cpu}
ROOMY = each(DEVICES, swa_full_tokens_ratio=0.8)


REPRO = Repro(
    name="parked_chunk",
    serves=f"a prompt of {LONG} tokens, chunks of {CHUNK}, a SWA pool of {POOL}",
    refuses=" or on a machine with a GPU",
    variants={
        "clean": Variant("a SWA pool of 6528 tokens, the fix is off", OFF, judge_clean, "ROOMY"),
        "broken": Variant("the fix is off, debugging is off", OFF, judge_broken),
        "diagnosed": diagnosed(
            "the fix is off, debugging is on",
            {**OFF, "G4DEBUG_HANG_SECONDS": str(HANG_SECONDS)},
            judge_diagnosed,
        ),
        "fixed": Variant("the fix parked-chunk is on", {}, same_outputs),
    },
    child="harness.standing",
    elsewhere=CPU_ONLY,
)

if __name__ == "__main__":
    raise SystemExit(main(REPRO, __doc__, "3"))
