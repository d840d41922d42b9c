"""A request that stays out of the prefix cache allocates its first chunk again and again.

The thread's script: a short prompt with the flag, a long prompt without it, and a long prompt with
it. The flag is ``bootstrap_host="2.2.2.2"``, which any client may send. The third request never
gets beyond its first chunk. Each step takes new pages for it, and nobody owns the old ones. The
thread's server dies when there are none left; this release waits for free pages, for ever.
"""

from __future__ import annotations

from suites.healthy.workload import Client
from suites.history.case import NATURAL, Arm, case, predicted

FLAG = "2.2.2.2"
SHORT, LONG = 160, 1200  # tokens


@case(
    number=4,
    title="a chunked request that skips the prefix cache takes new pages for its first chunk",
    threads=("#36855", "#33996", "#37024"),
    origin=NATURAL,
    buggy=Arm("0.5.12.post1"),
    fixed=Arm("0.5.23"),
    right=Arm("0.5.12.post1", engine={"chunked_prefill_size": 2048}),
    cause=(
        ("mem_cache/common.py", "maybe_cache_unfinished_req"),
        ("managers/scheduler.py", "stash_chunked_request"),
    ),
    mtp=False,
    seconds=100.0,
    engine={"max_total_tokens": 4096, "chunked_prefill_size": 512},
    why="Pages are lost in every step, and none is left before a count that is made now and then.",
    chosen_after=True,
    expected=predicted(
        na="strict kv-canary",
        silent="nothing g4debug sglang tree compute-sanitizer core",
        alarm="busy-inv watch",
        object="g4debug-best",
    ),
)
async def unowned_chunks(client: Client) -> None:
    await client.generate(client.prompt(SHORT), 4, name="short-flag", bootstrap_host=FLAG)
    await client.generate(client.prompt(LONG), 4, name="long-plain")
    await client.generate(client.prompt(LONG), 4, name="long-flag", bootstrap_host=FLAG)
