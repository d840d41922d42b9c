"""SGLang ends a decoding request with HTTP 500, because a prompt between two chunks has the pool.

No fault is injected: this is SGLang as released, 0.5.12 to 0.5.15 (reported in the manner of sglang
#28246: killed although most of the memory is free). It takes a SWA pool that is smaller than two
prefill chunks, no prefix cache, a request that decodes, and prompts of more than two chunks behind
it. The script runs on the CPU engine only.
"""

from __future__ import annotations

import random

from harness.killed import repro
from harness.stand_still import ENGINE, POOL, with_room
from harness.variants import main
from harness.workload import Workload

DECODES, ANSWER = 60, 400  # tokens of the request that decodes
LONG, SHORT_ANSWER = 1500, 8  # tokens of the prompts behind it
CHUNK = 512  # tokens of a prefill chunk


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
REPRO = repro(
    "parked_decode",
    "parked-chunk",
    f"an answer of {ANSWER} tokens, prompts of {LONG} in chunks of {CHUNK}, a SWA pool of {POOL}",
    "The request that decodes ends with HTTP 500, while a prompt waits",
)

if __name__ == "__main__":
    raise SystemExit(main(REPRO, __doc__, "3"))
