"""``SGLANG_ENABLE_PIECEWISE_CUDA_GRAPH_FOR_MM=1`` allows piecewise CUDA graphs. Off by default.

SGLang switches piecewise CUDA graphs off for every multimodal model. The runner captures only the
language model, so with the switch Gemma-4's language model is captured, and the towers stay eager.
If SGLang has another reason to switch them off, they stay off. From seed PR #16.

The server does not start, and says why, with a model for which this is not known to be right:

* with KV-shared layers while the fix optional-kv is off, because they crash in the capture;
* with per-layer inputs (``hidden_size_per_layer_input > 0``, as in E2B and E4B).
  ``gemma4_mm.py:561`` makes them outside of the graph, anew for each prefill, and the graph's
  static buffers (``piecewise_cuda_graph_runner.py:276``) have no place for them. So a replay reads
  what lies where they were at capture. ``repro/mm_piecewise_parity.py`` forced this on a H200: the
  server captured, and then died of an illegal memory access. The fork reported 0 of 20 outputs
  equal for one configuration that it did not name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from g4debug.fixes.base import Fix, around
from g4debug.fixes.source import source
from g4debug.settings import fix_switch

ID = "mm-piecewise-graph"
SWITCH = "SGLANG_ENABLE_PIECEWISE_CUDA_GRAPH_FOR_MM"
HANDLER = "sglang.srt.server_args.ServerArgs._handle_piecewise_cuda_graph"
ARCHITECTURE = "Gemma4ForConditionalGeneration"
logger = logging.getLogger("g4debug")


def around_handler(call_next: Callable[..., None], server_args: Any) -> None:
    """Wraps ``ServerArgs._handle_piecewise_cuda_graph``. SystemExit if the model has a limit."""
    config = server_args.get_model_config()
    if not config.is_multimodal or server_args.enforce_piecewise_cuda_graph:
        return call_next(server_args)
    if server_args.disable_piecewise_cuda_graph:
        logger.warning("g4debug: %s has no effect: --disable-piecewise-cuda-graph is given", SWITCH)
        return call_next(server_args)
    if ARCHITECTURE not in config.hf_config.architectures:
        logger.warning(
            "g4debug: %s is for %s only, and this is %s: piecewise CUDA graphs stay off",
            SWITCH, ARCHITECTURE, ", ".join(config.hf_config.architectures),
        )  # fmt: skip
        return call_next(server_args)
    reasons = limits(config.hf_text_config, kv_shared_runs())
    if reasons:
        raise SystemExit(f"g4debug: {SWITCH}=1 is refused for this model: {'; '.join(reasons)}")
    config.is_multimodal = (
        False  # only this condition is lifted; the function reads it nowhere else
    )
    try:
        call_next(server_args)
    finally:
        config.is_multimodal = True
    if server_args.disable_piecewise_cuda_graph:
        logger.warning("g4debug: %s has no effect: SGLang has another reason to be off", SWITCH)
    else:
        logger.info("g4debug: %s: the language model gets piecewise CUDA graphs", SWITCH)


def limits(text_config: Any, kv_shared_runs: bool) -> list[str]:
    """Why a Gemma-4 with this text config must not have piecewise CUDA graphs; [] if it may."""
    layers, found = text_config.num_hidden_layers, []
    shared = getattr(text_config, "num_kv_shared_layers", 0) or 0
    ple = getattr(text_config, "hidden_size_per_layer_input", 0) or 0
    if shared and not kv_shared_runs:
        found.append(
            f"{shared} of its {layers} layers are KV-shared, which crashes in the capture while "
            f"the fix optional-kv is off; unset {fix_switch('optional-kv')}"
        )
    if ple:
        found.append(
            f"it has per-layer inputs of size {ple}, which are made outside of the graph, so that "
            f"a replay would read old ones; unset {SWITCH}"
        )
    return found


def kv_shared_runs() -> bool:
    """True if KV-shared layers run in a graph, with SGLang alone or by the fix optional-kv."""
    from g4debug.fixes.base import state_of
    from g4debug.fixes.before_0_5_14 import optional_kv

    state = state_of(optional_kv.ID)
    return state == "applied" or not optional_kv.still_broken()


def still_broken() -> bool:
    """True if SGLang switches piecewise CUDA graphs off for every multimodal model."""
    return ".is_multimodal:" in source(HANDLER)


FIX = Fix(
    id=ID,
    title="piecewise CUDA graphs for the language model of a multimodal Gemma-4",
    seed="PR #16",
    upstream="none for Gemma-4; 0.5.14 has a list of multimodal models that may have them",
    needs=">=0.5.12,<0.5.14",
    elsewhere={
        ">=0.5.14": "SGLang decides for each model there whether its prefill gets CUDA graphs",
    },
    still_broken=still_broken,
    hooks=(around("args.piecewise", around_handler),),
    purpose="experiment",
    switch=SWITCH,
)
