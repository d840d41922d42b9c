"""SGLang ends the only request of a server with HTTP 500, because its own prompt fills the pool.

No fault is injected: this is SGLang as released, 0.5.12 to 0.5.15. It takes one request: a prompt
that nearly fills the SWA pool, and an answer of more than a page. The prefix cache has the prompt
as one node, which the request has locked whole, far behind its window. The script runs on the CPU
engine only.
"""

from __future__ import annotations

from harness.killed import repro
from harness.stand_still import ENGINE, POOL, with_room
from harness.variants import main
from harness.workload import Workload

PROMPT, ANSWER = 701, 70  # tokens


def cpu(requests: int | None) -> Workload:
    """A tiny E4B-shaped model on torch stand-ins; real SGLang otherwise."""
    return Workload.toy(1, (PROMPT, PROMPT), ANSWER, chunked_prefill_size=1024, **ENGINE)


DEVICES = {"cpu": cpu}
ROOMY = with_room(DEVICES)
REPRO = repro(
    "last_decode",
    "last-decode",
    f"a prompt of {PROMPT} tokens, an answer of {ANSWER}, a SWA pool of {POOL}",
    "Its request ends with HTTP 500, on a server that serves nobody else",
)

if __name__ == "__main__":
    raise SystemExit(main(REPRO, __doc__, ""))
