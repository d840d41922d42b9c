"""Lets a Gemma-4 with KV-shared layers start where SGLang's CUDA graphs of a prefill refuse it.

A KV-shared layer of E2B or E4B has no KV of its own. It reads that of an earlier layer, and its
``RadixAttention`` has that layer's ``layer_id``. From 0.5.21 on the graphs of a prefill look up
attention layers by ``layer_id``: ``index_attention_layers_by_global_id`` knows a layer that comes
twice, and raises ``ValueError: invalid or duplicate attention layer_id`` for two layers with one
id. So such a model as ``Gemma4ForCausalLM`` dies at start with SGLang's default arguments.
(SGLang switches these graphs off by itself for the multimodal class.)

With the fix such a server prefills without CUDA graphs, as it would with
``--disable-prefill-cuda-graph``: what comes back is what SGLang itself returns for other models
that its graphs do not know. Found by this project on a H100; not fixed upstream yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from g4debug.fixes.base import Fix, around
from g4debug.fixes.source import exists, source

ID = "shared-kv-graphs"
SETUP = "sglang.srt.model_executor.model_runner_components.cuda_graph_setup"
INDEX = f"{SETUP}.index_attention_layers_by_global_id"
SAYS = "invalid or duplicate attention layer_id"
GEMMA4 = "sglang.srt.models.gemma4_causal.Gemma4Attention"

logger = logging.getLogger("g4debug")


def around_capture(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps ``capture_prefill_graph``. A ValueError that says anything else is raised on."""
    try:
        return original(*args, **kwargs)
    except ValueError as e:
        if SAYS not in str(e):
            raise
        logger.warning(
            "g4debug: %s: prefills run without CUDA graphs: SGLang's graphs say %r of a model "
            "with KV-shared layers, and would end the server",
            ID,
            str(e),
        )
    return _eager(**kwargs)


def _eager(*, model_runner: Any, eager_runner: Any, **more: Any) -> Any:
    """What SGLang returns where a prefill gets no graphs; a draft gets no runner then."""
    from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import GraphCapture

    draft = model_runner.is_draft_worker
    return GraphCapture(
        runner=None if draft else eager_runner,
        memory_phase="draft_prefill" if draft else "prefill",
        memory_usage_gb=0,
        capture_time=0,
    )


def still_broken() -> bool:
    """True if two layers with one id are refused, and KV-shared layers have another's id."""
    if not exists(INDEX):
        return False
    shared = "self.kv_shared_layer_index if self.is_kv_shared_layer" in source(GEMMA4)
    return shared and SAYS in source(INDEX)


FIX = Fix(
    id=ID,
    title="a Gemma-4 with KV-shared layers starts, with prefills without CUDA graphs",
    seed="none; found by this project on 0.5.23",
    upstream="no thread is known; 0.5.21 and 0.5.23 have the bug",
    needs=">=0.5.21",
    elsewhere={"<0.5.21": "its graphs of a prefill do not look up layers by their id there"},
    still_broken=still_broken,
    hooks=(around("graphs.capture_prefill", around_capture),),
    purpose="correctness",
)
