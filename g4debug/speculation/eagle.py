"""EAGLE: a draft model of one layer or few, with KV of its own, on the target's hidden states.

EAGLE3 and STANDALONE run the same worker, with other draft models. Multi-layer EAGLE has a worker,
and an adapter, of its own.
"""

from __future__ import annotations

import importlib
from typing import Any

from g4debug.hooking.targets import CPU, H100, H200
from g4debug.speculation.base import Adapter

NAME = "EAGLE"


def named(algorithm: Any, name: str) -> bool:
    return getattr(algorithm, "name", "") == name and not several_models()


def several_models() -> bool:
    """True if this server has one draft model for each step, which another worker runs."""
    context = importlib.import_module("sglang.srt.runtime_context")
    # Up to 0.5.15 the arguments of drafts are not apart from the others.
    published = getattr(context, "get_spec", None) or context.get_server_args
    try:
        return bool(published().enable_multi_layer_eagle)
    except ValueError:  # SGLang's way to say that nothing is published yet
        return False


ADAPTER = Adapter(
    name=NAME,
    runs=lambda algorithm: named(algorithm, NAME),
    prefix="Eagle",
    draft_writes_kv=True,
    overlap=True,
    sites={
        "forward": ("eagle.forward",),
        "draft": ("eagle.draft",),
        "verify": ("worker.verify",),
        "draft_extend": ("eagle.draft_extend",),
    },
    ends={"scheduler.run_batch": lambda scheduler: True},
    run={"0.5.15.post1": (CPU,), "0.5.23": (CPU, H100, H200)},
    releases=">=0.5.15",
    seeds=False,
    replayed=">=0.5.23",
)
