"""The workload of locked_prefix: a shared prefix, one long answer, pressure on the SWA pool.

The first two requests, and later every third one, start with the same prefix (a system prompt,
say). The first two put it into the cache. The second one writes a long answer and so keeps the
prefix locked. Others fill the SWA pool until the cache drops the SWA half of the prefix, and then
another request computes the same prefix again.
"""

from __future__ import annotations

import random

from harness.workload import Workload, each

PREFIX, OWN = 256, 192  # tokens; the toy model's window is 128
LONG, SHORT = 160, 3  # tokens of an answer


class Shared(Workload):
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
    from g4debug.cpu.geometry import TINY
    from g4debug.cpu.server import engine_arguments

    count = max(4, requests or 24)
    arguments = engine_arguments(
        log_level="info",
        decode_log_interval=1,
        skip_tokenizer_init=True,
        max_total_tokens=4096,
        swa_full_tokens_ratio=0.3,
        max_running_requests=2,
        chunked_prefill_size=512,
    )
    output = [SHORT, LONG, *[SHORT] * (count - 2)]
    lengths = PREFIX + 64, PREFIX + OWN
    return Shared(count, lengths, output, TINY.vocab, arguments, timeout=300)


DEVICES = {"cpu": cpu}
# Without the prefix cache there is nothing to share: these are the right answers.
UNCACHED = each(DEVICES, disable_radix_cache=True)
