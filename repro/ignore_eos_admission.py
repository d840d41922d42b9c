"""SGLang serves nobody any more: a request may generate one token more than SGLang admits.

No fault is injected: this is SGLang as released, 0.5.23 (0.5.21 reads the same). It takes one KV
pool (no SWA layers), no prefix cache, and a request with ``ignore_eos`` that asks for at least as
many tokens as the pool has room for. SGLang cuts that to what it takes to be the most, and then
does not admit it, on an empty pool. Nothing is logged, and the server's health stays good. The
script runs on the CPU engine only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.stand_still import repro, serves_nobody
from harness.variants import main
from harness.workload import Workload, each

POOL, PAGE = 256, 64  # tokens
PROMPT = 128  # tokens of each prompt: whole pages
# What SGLang cuts each larger max_new_tokens to. It is asked for outright, so that *clean*, whose
# pool has room for more, gives the same answer.
MOST = POOL - PROMPT - PAGE - 1
ENGINE: Mapping[str, Any] = {
    "model": "llama",
    "page_size": PAGE,
    "max_total_tokens": POOL,
    "disable_radix_cache": True,
}


def cpu(requests: int | None) -> Workload:
    """A tiny Llama on torch stand-ins; real SGLang otherwise."""
    return Workload.toy(requests or 2, (PROMPT, PROMPT), MOST, **ENGINE)


DEVICES = {"cpu": cpu}
ROOMY = each(DEVICES, max_total_tokens=8192)
REPRO = repro(
    "ignore_eos_admission",
    "ignore-eos-admission",
    f"prompts of {PROMPT} tokens and answers of {MOST}",
    serves_nobody,
    pool=f"a full pool of {POOL}",
    room="a full pool of 8192 tokens",
    releases=">=0.5.21",
    shown_on="0.5.23",
)

if __name__ == "__main__":
    raise SystemExit(main(REPRO, __doc__, "2"))
