"""Multi-layer EAGLE: a draft model of one layer for each step, each with a KV pool of its own.

SGLang runs EAGLE so for targets that have such layers (MiMo-V2, Step-3.5). The extend behind a
verify runs all of them, one after the other, and so drafts every token of the next verify already.
What is handed on is those tokens, and no hidden states: the next draft reads none. Behind a prefill
the draft input still has the target's of all its tokens, which nobody reads.
"""

from __future__ import annotations

from dataclasses import replace

from g4debug.hooking.targets import CPU
from g4debug.speculation import eagle

NAME = "multi-layer EAGLE"

ADAPTER = replace(
    eagle.ADAPTER,
    name=NAME,
    runs=lambda algorithm: getattr(algorithm, "name", "") == eagle.NAME and eagle.several_models(),
    hands_hidden=False,
    sites={
        "forward": ("layered.forward",),
        "draft": ("layered.draft",),
        "verify": ("layered.verify",),
        "draft_extend": ("layered.draft_extend",),
    },
    run={"0.5.23": (CPU,)},
    releases=">=0.5.23",
    pools=lambda worker: tuple(r.token_to_kv_pool for r in worker.draft_worker.draft_runners),
)
