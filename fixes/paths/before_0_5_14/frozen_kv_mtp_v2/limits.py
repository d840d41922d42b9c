"""Where FROZEN_KV_MTP does not run on speculative decoding v2, and why.

A server that does not fit stays on SGLang's v1 worker, and its log says why. A request that does
not fit is refused, and its answer says why: it cannot be served by v1, because a server has one
worker.
"""

from __future__ import annotations

from typing import Any

from g4debug.backends import adapters, names, phases

SWITCH = "SGLANG_FROZEN_KV_MTP_V2"
# Others (flashinfer) plan with the lengths on the host, and of those only a bound is known while
# the last verify still runs.
BACKENDS = tuple(adapter for adapter in adapters() if adapter.lengths_on_device)
_SWITCHED_ON = (
    ("enable_dp_attention", "with --enable-dp-attention a rank may have to idle in a draft"),
    ("enable_pdmux", "--enable-pdmux runs prefill beside decode"),
    ("enable_lora", "it was not run with --enable-lora"),
    (
        "enable_custom_logit_processor",
        "SGLang's v2 verify does not call the custom logit processor of a request",
    ),
    (
        "enable_return_hidden_states",
        "v2 keeps the hidden states of rejected drafts among those that it returns",
    ),
    ("speculative_adaptive", "its draft graphs are for one number of draft steps"),
    ("enable_hisparse", "it was not run with --enable-hisparse"),
)
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")


def server_limit(args: Any) -> str:
    """Why a server with these ServerArgs stays on v1; '' if it runs on v2.

    args: after SGLang has resolved the algorithm to FROZEN_KV_MTP.
    """
    topk, page = args.speculative_eagle_topk, args.page_size
    if topk != 1:
        paged = f", and its allocation knows none with page size {page}" if (page or 1) > 1 else ""
        return f"v2 verifies a chain, got --speculative-eagle-topk {topk}{paged}"
    steps, tokens = args.speculative_num_steps, args.speculative_num_draft_tokens
    if tokens != steps + 1:
        return (
            f"a chain of {steps} draft steps has {steps + 1} tokens, got "
            f"--speculative-num-draft-tokens {tokens}"
        )
    if getattr(args, "disaggregation_mode", "null") not in (None, "null"):
        return "prefill and decode are disaggregated, so another server made the hidden states"
    if (getattr(args, "pp_size", 1) or 1) > 1:
        return "with pipeline parallelism the ranks of one step draft at different times"
    for name, why in _SWITCHED_ON:
        if getattr(args, name, False):
            return why
    for backend in phases.asked(args).values():
        if backend not in {adapter.name for adapter in BACKENDS}:
            return f"{backend} plans with exact lengths on the host, expected {names(BACKENDS)}"
    return ""


def request_limit(request: Any) -> str:
    """Why a ``Req`` is refused on v2; '' if it is served."""
    asked = [name for name in _GRAMMARS if getattr(request.sampling_params, name, None) is not None]
    if not asked:
        return ""
    return (
        f"{asked[0]} is not served with {SWITCH}=1: the mask of a grammar needs each token on the "
        f"host before the next step, which v2 does not wait for. Unset {SWITCH} to serve it."
    )
