"""SGLang serves nobody any more: a request's own cached prefix holds the room that it lacks.

No fault is injected: this is SGLang as released, 0.5.12 to 0.5.23. It takes a SWA pool of a few
windows and two turns of one conversation. The second turn fits into the pool, but not into what its
own prefix leaves of it. The server is idle, and nothing will ever change. Nothing is logged, and
its health stays good. The script runs on the CPU engine only.
"""

from __future__ import annotations

import random

from harness.processes import Outcome
from harness.stand_still import ENGINE, repro, with_room
from harness.standing import PATIENCE
from harness.variants import main
from harness.verdicts import Bad, completed
from harness.workload import Workload

TURN, MORE = 301, 555  # tokens of the first turn, and what the second one has behind it
CHUNK = 1024  # tokens of a prefill chunk


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
        chunked_prefill_size=CHUNK,
        **ENGINE,
    )


DEVICES = {"cpu": cpu}
ROOMY = with_room(DEVICES)
REPRO = repro(
    "idle_admission", "idle-admission", f"two turns of {TURN} and {TURN + MORE} tokens", stands
)

if __name__ == "__main__":
    raise SystemExit(main(REPRO, __doc__, "2"))
