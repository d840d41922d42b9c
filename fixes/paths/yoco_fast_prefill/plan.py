"""Which rows of a prefill somebody reads after the last layer, and when that is not known.

The rows of a request are its new tokens in order. Those that are read are always the last ones:

* If the prompt ends in this forward, the last row is read. A token is sampled from it, and
  FROZEN_KV_MTP makes its draft input of it (``select_last_extend_hidden``).
* With prompt logprobs, all rows from ``extend_logprob_start_len`` on are read.
* Of a chunk that is not the last one of its prompt no row is read: SGLang throws its sample away.

The host knows all of this, so a plan does not wait for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from g4debug.fixes.paths import base
from g4debug.fixes.paths.yoco_fast_prefill import giving_up

FACTS = "g4debug_yoco_facts"  # attribute of a ForwardBatch, set when SGLang makes it


@dataclass(frozen=True)
class Facts:
    """Facts that only the requests know. goes_on: for each request, whether its prompt goes on."""

    goes_on: tuple[bool, ...]
    hidden_states: bool  # a request asked for its hidden states


def after_init_new(
    forward_batch: Any, cls: Any, batch: Any, model_runner: Any, *args: Any, **kwargs: Any
) -> Any:
    """Runs after ``ForwardBatch.init_new``: keeps the facts of a prefill of the target model."""
    with giving_up.handled():
        facts = facts_of(forward_batch, batch, model_runner)
        if facts is not None:
            setattr(forward_batch, FACTS, facts)
    return forward_batch


def facts_of(forward_batch: Any, batch: Any, model_runner: Any) -> Facts | None:
    """The facts of a prefill of the target model; None of another forward."""
    mode = forward_batch.forward_mode
    if not (mode.is_mixed() or mode.name == "EXTEND") or model_runner.is_draft_worker:
        return None
    old, new = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
    if new is None:
        return None
    if not len(old) == len(new) == len(batch.reqs):
        # Every rank has these lists alike, so all of them compute all rows.
        base.once(giving_up.ID, "not used: a batch has other lengths than requests")
        return None
    lengths = zip(old, new, batch.reqs, strict=True)
    return Facts(
        goes_on=tuple(_goes_on(request, int(o) + int(n)) for o, n, request in lengths),
        hidden_states=any(request.return_hidden_states for request in batch.reqs),
    )


def after_load_batch(
    loaded: Any, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Runs after ``EagerRunner.load_batch``, which copies a batch, but only its own fields."""
    facts = getattr(forward_batch, FACTS, None)
    if facts is not None:
        setattr(loaded, FACTS, facts)
    return loaded


def _goes_on(request: Any, end: int) -> bool:
    """True if SGLang will not use the token that is sampled after token ``end`` of the request.

    Both the length and the count of chunks must say so, because under overlap scheduling the count
    may still have the chunk before.
    """
    whole = len(request.origin_input_ids) + len(request.output_ids)
    # It has this name from 0.5.13 on.
    chunks = getattr(request, "inflight_middle_chunks", None)
    return end < whole and (request.is_chunked if chunks is None else chunks) > 0


def rows_read(forward_batch: Any, facts: Facts) -> list[int]:
    """How many rows of each request are read. They are its last ones."""
    new = [int(n) for n in forward_batch.extend_seq_lens_cpu]
    kept = [0 if goes_on else 1 for goes_on in facts.goes_on]
    if forward_batch.return_logprob:
        starts = forward_batch.extend_logprob_start_lens_cpu
        wanted = [n - int(start) for n, start in zip(new, starts, strict=True)]
        kept = [max(k, w) for k, w in zip(kept, wanted, strict=True)]
    return kept


def _padded(forward_batch: Any) -> bool:
    return (
        getattr(forward_batch, "padded_static_len", -1) >= 0
        or sum(forward_batch.extend_seq_lens_cpu) != len(forward_batch.positions)
        # Each rank has a part of the rows.
        or getattr(forward_batch, "attn_tp_sequence_sharded", False)
    )


def _pooled(forward_batch: Any) -> bool:
    """True if other rows than the last ones are read: for pooling, scores or decisions."""
    fields = ("multi_item_delimiter_indices", "token_indices_to_pool", "decision_layouts")
    return any(getattr(forward_batch, name, None) is not None for name in fields)


def plan(forward_batch: Any, captured: list[int], first: int) -> list[int] | str:
    """How many rows to keep of each request, or why all must be computed.

    captured: the model's ``layers_to_capture``, where ``n`` means the input of layer n. first: the
    first KV-shared layer.
    """
    facts = getattr(forward_batch, FACTS, None)
    if facts is None:
        return "no prefill of the target"
    spec = forward_batch.spec_algorithm
    frozen = spec is not None and spec.is_frozen_kv_mtp()
    # They are checked in this order. The first one that holds is the reason.
    reasons = {
        "speculative decoding other than FROZEN_KV_MTP": not (
            spec is None or spec.is_none() or frozen
        ),
        "hidden states were asked for": facts.hidden_states
        or (forward_batch.capture_hidden_mode.is_full() and not frozen)
        or forward_batch.return_pooled_hidden_states
        or forward_batch.return_hidden_states_before_norm,
        "hidden states are captured in the KV-shared layers": any(n > first for n in captured),
        "multi-item scoring or pooling": _pooled(forward_batch),
        "attention of DP or CP ranks": forward_batch.global_num_tokens_cpu is not None
        or forward_batch.attn_cp_metadata is not None,
        "two-batch overlap": forward_batch.tbo_children is not None
        or forward_batch.tbo_split_seq_index is not None,
        "LoRA": any(lora is not None for lora in forward_batch.lora_ids or ()),
        "cross-attention": forward_batch.encoder_lens is not None,
        "rows are padded, or divided among the ranks": _padded(forward_batch),
    }
    for reason, holds in reasons.items():
        if holds:
            return reason
    kept = rows_read(forward_batch, facts)
    return kept if sum(kept) < len(forward_batch.positions) else "every row is read"
