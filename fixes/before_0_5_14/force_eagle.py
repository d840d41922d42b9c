"""``SGLANG_GEMMA4_FORCE_EAGLE=1`` keeps EAGLE for a Gemma-4 assistant. Off by default.

If the draft is a Gemma-4 assistant, SGLang turns ``--speculative-algorithm NEXTN`` and ``EAGLE``
into FROZEN_KV_MTP. With the switch they stay EAGLE, so that the two can be compared. From seed
PR #22. Most assistants cannot be served by EAGLE. The server would die later and without the
reason, so this stops it at start, and says why:

* The draft's CUDA graphs keep hidden states of the *assistant's* hidden size
  (``EagleDraftInput.hidden_size_for``), but its model wants the target's (``gemma4_mtp.py``).
* EAGLE gives a draft a KV pool of its own, with one head dimension. If the full and sliding layers
  of an assistant have different ones, its first prefill dies of "shape mismatch: value tensor ...".
  (This was run on the CPU engine. With equal head dimensions the assistant is served without CUDA
  graphs, even if the hidden sizes differ.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from g4debug.fixes.base import Fix, around, before
from g4debug.fixes.source import source

SWITCH = "SGLANG_GEMMA4_FORCE_EAGLE"
ASSISTANT = "Gemma4AssistantForCausalLM"
PROMOTED = "FROZEN_KV_MTP"
_ALIAS = "_resolve_speculative_algorithm_alias"
_HOMES = ("sglang.srt.server_args", "sglang.srt.arg_groups.speculative_hook")
_HEAD_DIMS = ("head_dim", "global_head_dim", "swa_head_dim")
logger = logging.getLogger("g4debug")


def around_alias(
    call_next: Callable[..., Any], algorithm: str | None, *args: Any, **kwargs: Any
) -> Any:
    """Wraps ``_resolve_speculative_algorithm_alias(algorithm, draft_path, ...)``."""
    resolved = call_next(algorithm, *args, **kwargs)
    if resolved != PROMOTED:
        return resolved
    if algorithm not in ("NEXTN", "EAGLE"):
        raise SystemExit(
            f"g4debug: {SWITCH}=1 and --speculative-algorithm {algorithm} contradict each other; "
            f"drop one of them"
        )
    logger.warning(
        "g4debug: %s: --speculative-algorithm %s stays EAGLE, not %s", SWITCH, algorithm, PROMOTED
    )
    return "EAGLE"


def before_check(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """Runs before ``ServerArgs.check_server_args``: SystemExit if EAGLE cannot serve the draft."""
    if server_args.speculative_algorithm != "EAGLE":
        return
    from sglang.srt.utils.hf_transformers_utils import get_config

    config = get_config(
        server_args.speculative_draft_model_path, trust_remote_code=server_args.trust_remote_code
    )
    if ASSISTANT not in (getattr(config, "architectures", None) or ()):
        return
    reasons = limits(config, cuda_graphs=not server_args.disable_cuda_graph)
    if reasons:
        raise SystemExit(
            f"g4debug: {SWITCH}=1: this assistant cannot be served by EAGLE: {'; '.join(reasons)}. "
            f"Unset {SWITCH}: SGLang then uses {PROMOTED}"
        )


def limits(config: Any, cuda_graphs: bool) -> list[str]:
    """Why an assistant with this Hugging Face config cannot be an EAGLE draft; [] if it can."""
    text = config.text_config
    hidden, backbone = text.hidden_size, config.backbone_hidden_size
    dims = sorted({d for d in (getattr(text, name, None) for name in _HEAD_DIMS) if d})
    found = []
    if hidden != backbone and cuda_graphs:
        found.append(
            f"its hidden size is {hidden}, the target's {backbone}, and EAGLE's draft graphs keep "
            f"hidden states of {hidden} (--disable-cuda-graph would avoid that)"
        )
    if len(dims) > 1:
        found.append(
            f"its layers have head dimensions {' and '.join(map(str, dims))}, and EAGLE's draft "
            "pool has one"
        )
    return found


def still_broken() -> bool:
    """True if SGLang turns EAGLE into FROZEN_KV_MTP and has no switch of that name."""
    for home in _HOMES:
        try:
            alias = source(f"{home}.{_ALIAS}")
        except AttributeError:
            continue  # in this release it is in the other module
        return PROMOTED in alias and SWITCH not in alias
    raise AttributeError(f"no {_ALIAS} in {' or '.join(_HOMES)}")


FIX = Fix(
    id="force-eagle",
    title="a switch for comparisons: NEXTN and EAGLE with a Gemma-4 assistant stay EAGLE",
    seed="PR #22",
    upstream="none",
    needs=">=0.5.12,<0.5.14",
    elsewhere={">=0.5.14": "it only has speculative decoding v2, and this was written for v1"},
    still_broken=still_broken,
    hooks=(
        around("args.spec_alias", around_alias),
        before("server_args.check", before_check),
    ),
    purpose="experiment",
    switch=SWITCH,
)
