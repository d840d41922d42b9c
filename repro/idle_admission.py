"""SGLang serves nobody any more: a request's own cached prefix holds the room that it lacks.

No fault is injected: this is SGLang as released, 0.5.12 to 0.5.23. It takes a SWA pool of a few
windows and two turns of one conversation. The second turn fits into the pool, but not into what its
own prefix leaves of it. The server is idle, and nothing will ever change. Nothing is logged, and
its health stays good. The script runs on the CPU engine only.
"""

from __future__ import annotations

import random

from harness.processes import Outcome
from harness.standing import PATIENCE
from harness.variants import CPU_ONLY, Repro, Variant, diagnosed, main
from harness.verdicts import Bad, completed, judge, only_if, same_outputs, told
from harness.workload import Workload, each

OFF = {"G4DEBUG_FIX_IDLE_ADMISSION": "0"}
HANG_SECONDS = 10
TURN, MORE = 301, 555  # tokens of the first turn, and what the second one has behind it
CHUNK, POOL = 1024, 768  # tokens of a prefill chunk and of the SWA pool


@judge
def judge_clean(run: Outcome) -> str:
    completed(run)
    return only_if(
        not run.result["unserved"], f"It serves all {len(run.result['tokens'])} requests."
    )


def stands(run: Outcome) -> str:
    """What a user sees. Raises Bad unless the first turn is served, and then nobody."""
    completed(run)
    tokens = run.result["tokens"]
    if tokens[0] is None or any(t is not None for t in tokens[1:]):
        raise Bad(f"It serves {sum(t is not None for t in tokens)} of {len(tokens)} requests.")
    if not run.result["turns"]:
        raise Bad("Its scheduler does not answer any more: that is another bug.")
    return (
        f"It serves the first turn, and none of the {len(tokens) - 1} behind it within "
        f"{PATIENCE:.0f} s. Its scheduler goes on as if nothing were wrong."
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


class Turns(Workload):
    """A first turn of a conversation, and then second ones."""

    in_turns = True

    def prompts(self, seed: int = 0) -> list[list[int]]:
        rng = random.Random(seed)

        def tokens(n: int) -> list[int]:
            return [rng.randrange(4, self.vocab) for _ in range(n)]

        first = [2, *tokens(TURN - 1)]
        return [first, *(first + tokens(MORE) for _ in range(self.requests - 1))]


def cpu(requests: int | None) -> Workload:
    """A tiny E4B-shaped model on torch stand-ins; real SGLang otherwise."""
    return Turns.toy(
        max(2, requests or 2),
        (TURN, TURN + MORE),
        8,
        mtp=False,
        max_running_requests=None,  # 0.5.23 makes the SWA pool larger if it is given
        max_total_tokens=8192,
        swa_full_tokens_ratio=0.1,
        chunked_prefill_size=CHUNK,
    )


DEVICES = {"cpu": cpu}
ROOMY = each(DEVICES, swa_full_tokens_ratio=0.8)


REPRO = Repro(
    name="idle_admission",
    serves=f"two turns of {TURN} and {TURN + MORE} tokens, a SWA pool of {POOL}",
    refuses=" or on a machine with a GPU",
    variants={
        "clean": Variant("a SWA pool of 6528 tokens, the fix is off", OFF, judge_clean, "ROOMY"),
        "broken": Variant("the fix is off, debugging is off", OFF, judge_broken),
        "diagnosed": diagnosed(
            "the fix is off, debugging is on",
            {**OFF, "G4DEBUG_HANG_SECONDS": str(HANG_SECONDS)},
            judge_diagnosed,
        ),
        "fixed": Variant("the fix idle-admission is on", {}, same_outputs),
    },
    child="harness.standing",
    elsewhere=CPU_ONLY,
)

if __name__ == "__main__":
    raise SystemExit(main(REPRO, __doc__, "2"))
