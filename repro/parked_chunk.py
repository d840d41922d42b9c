"""SGLang serves nobody any more: a prompt waits for room that it holds itself.

No fault is injected: this is SGLang as released, 0.5.12 to 0.5.23. It takes a SWA pool that is
smaller than two prefill chunks, no prefix cache, and one prompt of more than two chunks. Nothing
is logged, and the server's health stays good. The script runs on the CPU engine only.
"""

from __future__ import annotations

import random

from harness.processes import Outcome
from harness.stand_still import ENGINE, repro, with_room
from harness.standing import PATIENCE
from harness.variants import main
from harness.verdicts import Bad, completed
from harness.workload import Workload

LONG, SHORT = 1600, 200  # tokens of the first prompt, and of those that come with it
CHUNK = 512  # tokens of a prefill chunk


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
        disable_radix_cache=True,
        chunked_prefill_size=CHUNK,
        **ENGINE,
    )


DEVICES = {"cpu": cpu}
ROOMY = with_room(DEVICES)
REPRO = repro(
    "parked_chunk", "parked-chunk", f"a prompt of {LONG} tokens, chunks of {CHUNK}", stands
)

if __name__ == "__main__":
    raise SystemExit(main(REPRO, __doc__, "3"))
