"""SGLang serves nobody any more: a prompt waits for room that it holds itself.

No fault is injected: this is SGLang as released, 0.5.12 to 0.5.23. It takes a SWA pool that is
smaller than two prefill chunks, no prefix cache, and one prompt of more than two chunks. Nothing
is logged, and the server's health stays good. The script runs on the CPU engine only.
"""

from __future__ import annotations

import random

from harness.stand_still import ENGINE, repro, serves_nobody, with_room
from harness.variants import main
from harness.workload import Workload

LONG, SHORT = 1600, 200  # tokens of the first prompt, and of those that come with it
CHUNK = 512  # tokens of a prefill chunk


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
    "parked_chunk", "parked-chunk", f"a prompt of {LONG} tokens, chunks of {CHUNK}", serves_nobody
)

if __name__ == "__main__":
    raise SystemExit(main(REPRO, __doc__, "3"))
