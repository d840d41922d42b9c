"""A chunk that was not admitted is handed to the prefix cache all the same.

A prompt waits for its next chunk: the SWA pool has no room for it. The scheduler has cut the
request for that chunk already. In the next round it hands the tokens of the chunk to the prefix
cache, which takes what lies in the request's row for their places. Nothing was ever written there.
0.5.12.post1 asks whether the chunk was scheduled; ``put_back/unadmitted_chunk.py`` says that it
was. In both arms our fix parked-chunk is on: without it this prompt would wait for ever.
"""

from __future__ import annotations

from suites.healthy.workload import Client
from suites.history.case import PUT_BACK, Arm, case, predicted

PROMPT = 1500  # tokens
SMALL_POOL = {
    "max_running_requests": None,
    "max_total_tokens": 8192,
    "swa_full_tokens_ratio": 0.1,
    "chunked_prefill_size": 640,  # the pool has 768
}


@case(
    number=17,
    title="a chunk that was not admitted goes into the prefix cache",
    threads=("#24252",),
    origin=PUT_BACK,
    buggy=Arm(
        "0.5.12.post1",
        fixes=("parked-chunk",),
        environ={"G4HISTORY_PUT_BACK": "unadmitted_chunk"},
    ),
    fixed=Arm("0.5.12.post1", fixes=("parked-chunk",)),
    cause=(
        ("managers/scheduler.py", "get_next_batch_to_run"),
        ("managers/scheduler.py", "stash_chunked_request"),
    ),
    mtp=False,
    seconds=100.0,
    engine=SMALL_POOL,
    why="The prefix cache gets places that the request never had, and no page is held wrongly yet.",
    chosen_after=True,
    expected=predicted(
        na="strict kv-canary",
        crash="nothing sglang busy-inv tree compute-sanitizer watch",
        object="g4debug g4debug-best",
    ),
)
async def unadmitted_chunk(client: Client) -> None:
    await client.generate(client.prompt(PROMPT), 8, name="long")
    await client.generate(client.prompt(300), 8, name="short")
