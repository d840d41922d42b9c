"""Two tensor-parallel ranks draft with the target's embedding, but each has only its own rows.

Found by this project on two GPUs; no thread is known. A user meets it with ``--tp-size 2`` and
FROZEN_KV_MTP on a text-only checkpoint, and any prompt.
"""

from __future__ import annotations

from suites.healthy.workload import Client
from suites.history.case import FLAGS, Arm, case, predicted


@case(
    number=10,
    title="the draft looks full token ids up in this rank's rows of the embedding",
    threads=(),
    origin=FLAGS,
    buggy=Arm("0.5.15.post1"),
    fixed=Arm("0.5.15.post1", fixes=("draft-embedding-shard",)),
    cause=(("models/gemma4_causal.py", "get_embed_and_head"),),
    engine={"tp_size": 2},
    why="No page is wrong, and on a GPU the crash names no line of Python.",
    expected=predicted(
        na="strict tree kv-canary",
        crash="nothing sglang busy-inv compute-sanitizer core watch",
        cause="g4debug g4debug-best",
    ),
)
async def draft_embedding_shard(client: Client) -> None:
    await client.batch(4, (60, 300), 24)
