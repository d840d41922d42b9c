"""The last requests of a batch all finish in one verify, and the next prefill is merged into it.

The thread's server dies at the stop sequences of tool calls. So half of these requests end at a
stop token. The pool holds one of them at a time, so the next one always waits.
"""

from __future__ import annotations

from suites.healthy.workload import WORDS, Client
from suites.history.case import NATURAL, Arm, case, predicted

REQUESTS = 10
STOPS = 150  # of the toy model's words, so that an answer meets one soon


@case(
    number=5,
    title="a batch in which every request finished keeps its verify input, and is merged",
    threads=("#27007", "#26859"),
    origin=NATURAL,
    buggy=Arm("0.5.12.post1"),
    fixed=Arm("0.5.12.post1", fixes=("idle-draft-input",)),
    cause=(
        ("speculative/frozen_kv_mtp_worker.py", "forward_batch_generation"),
        ("speculative/frozen_kv_mtp_worker.py", "_draft_preprocess_idle"),
    ),
    engine={"max_total_tokens": 512, "chunked_prefill_size": 512},
    why="The state between two steps is wrong, and no page is: checks of pages can say nothing.",
    expected=predicted(
        na="strict tree kv-canary",
        crash="nothing sglang busy-inv compute-sanitizer core watch",
        alarm="g4debug g4debug-best",
    ),
)
async def zero_accept(client: Client) -> None:
    stops = [client.between(*WORDS) for _ in range(STOPS)]
    await client.together(
        *(
            client.generate(
                client.prompt(client.between(270, 300)),
                client.between(8, 20),
                sampling={"stop_token_ids": stops} if i % 2 else None,
            )
            for i in range(REQUESTS)
        )
    )
