"""The second turn of a conversation lacks the SWA pages that its own first turn holds.

The thread's server has a SWA pool of a few windows and serves one user, who goes on with a
conversation. The cached first turn is locked while the second one is looked at, and the lock holds
all of it. What is left is less than the second turn needs, on a server that does nothing else.
"""

from __future__ import annotations

from suites.healthy.workload import Client
from suites.history.case import NATURAL, Arm, case, predicted

TURN, MORE = 500, 210  # tokens of the first turn, and what the user adds to it and its answer
SMALL_POOL = {
    "max_running_requests": None,
    "max_total_tokens": 8192,
    "swa_full_tokens_ratio": 0.1,
    "chunked_prefill_size": 1024,
}


@case(
    number=16,
    title="a second turn is never begun, because its own cached first turn holds the room",
    threads=("#32379",),
    origin=NATURAL,
    buggy=Arm("0.5.15.post1"),
    fixed=Arm("0.5.15.post1", fixes=("idle-admission",)),
    cause=(
        ("managers/schedule_policy.py", "add_one_req"),
        ("managers/schedule_policy.py", "_swa_budget_for_req"),
        ("managers/schedule_policy.py", "_lock_node"),
    ),
    mtp=False,
    seconds=100.0,
    stands=60.0,
    engine=SMALL_POOL,
    why="A hang without a chunk in progress: all that waits is in the queue.",
    chosen_after=True,
    expected=predicted(
        na="strict",
        stands="nothing sglang busy-inv tree kv-canary compute-sanitizer",
        alarm="g4debug g4debug-best watch",
    ),
)
async def idle_admission(client: Client) -> None:
    first = client.prompt(TURN)
    answer = await client.generate(first, 8, name="turn-1")
    await client.generate([*first, *answer["output_ids"], *client.tokens(MORE)], 8, name="turn-2")
