"""Makes sure that a batch has one row of draft state for each live request (seed PR #22).

``merge_batch`` and ``filter_batch`` of a ScheduleBatch expect ``spec_info`` to be a draft input
with one row for each unfinished request, and do not check it. If ``spec_info`` is a verify input or
draft-extend input that stayed, is None, or has the wrong number of rows, SGLang dies of an
AttributeError or of its own count. Or, which is worse, it takes the wrong rows, and a request goes
on from another request's token.

For FROZEN_KV_MTP (spec v1) this fix does the following:

* A batch without live requests needs no draft state and counts as idle (0 rows).
* Live requests without draft state of their own get a *plain row*: the bonus token is the request's
  last token, and the hidden state is zero. The verify decides on every token, so the output stays
  what it was. Only the guesses of one step are poor, and so is its accept length.
* If the draft state fits, SGLang's own code runs unchanged.

Each kind of repair is logged once per process, because something else must have gone wrong before.
(The seed skipped the merge instead. The batch then has no rows for the new requests, and the next
draft stops at an assertion.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from g4debug.fixes.base import Fix, around
from g4debug.fixes.source import source

ID = "spec-batch-guards"
BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
logger = logging.getLogger("g4debug")
_said: set[str] = set()


def around_merge(call_next: Callable[..., Any], batch: Any, other: Any) -> Any:
    """Wraps ``ScheduleBatch.merge_batch``, which appends the requests of ``other``."""
    if not _covers(batch) or (_fits(batch, live(batch)) and _fits(other, live(other))):
        return call_next(batch, other)
    mine, theirs = _rows_of(batch, "merge"), _rows_of(other, "merge")
    left = batch.spec_info
    batch.spec_info = None  # SGLang then merges everything else
    try:
        result = call_next(batch, other)
    except BaseException:
        batch.spec_info = left
        raise
    mine.merge_batch(theirs)
    batch.spec_info = mine
    return result


def around_filter(call_next: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps ``ScheduleBatch.filter_batch``, which keeps the unfinished or the given requests.

    A batch that has not run yet has no ``spec_info``, which is not a fault.
    """
    filtered = kwargs.get("v1_spec_info_filtered", args[2] if len(args) > 2 else False)
    rows = len(live(batch)) if filtered else len(batch.reqs)
    left = batch.spec_info
    if not _covers(batch) or left is None or (is_draft_input(left) and len(left.topk_p) == rows):
        return call_next(batch, *args, **kwargs)
    batch.spec_info = None
    try:
        result = call_next(batch, *args, **kwargs)
    except BaseException:
        batch.spec_info = left
        raise
    if not batch.reqs:
        batch.spec_info = left  # there is no request left that needs it
    else:
        _say("filter", left, rows)
        batch.spec_info = plain_rows(batch, batch.reqs)
    return result


def live(batch: Any) -> list[Any]:
    """The requests of a batch that are not finished."""
    return [r for r in batch.reqs if not r.finished()]


def is_draft_input(spec_info: Any) -> bool:
    from sglang.srt.speculative.eagle_info import EagleDraftInput

    return isinstance(spec_info, EagleDraftInput)


def plain_rows(batch: Any, requests: list[Any]) -> Any:
    """A FrozenKVMTPDraftInput with a plain row for each of ``requests``, idle if there are none.

    bonus_tokens int64 [n], hidden_states [n, hidden of the target], topk_p float32 [n, topk],
    topk_index int64 [n, topk].
    """
    import torch
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.server_args import get_global_server_args
    from sglang.srt.speculative.frozen_kv_mtp_info import FrozenKVMTPDraftInput

    config, device = batch.model_config, batch.device
    last = [(r.output_ids or r.origin_input_ids)[-1] for r in requests]
    bonus = torch.tensor(last, dtype=torch.int64, device=device)
    topk = get_global_server_args().speculative_eagle_topk
    return FrozenKVMTPDraftInput(
        bonus_tokens=bonus,
        hidden_states=torch.zeros(
            len(last), config.hf_text_config.hidden_size, dtype=config.dtype, device=device
        ),
        topk_p=torch.ones(len(last), topk, dtype=torch.float32, device=device),
        topk_index=bonus[:, None].repeat(1, topk),
        capture_hidden_mode=CaptureHiddenMode.LAST,
    )


def _covers(batch: Any) -> bool:
    """True with FROZEN_KV_MTP and without overlap scheduling, where rows are filled in later."""
    return bool(batch.spec_algorithm.is_frozen_kv_mtp()) and not batch.is_spec_v2


def _fits(batch: Any, requests: list[Any]) -> bool:
    spec_info = batch.spec_info
    return is_draft_input(spec_info) and len(spec_info.topk_p) == len(requests)


def _rows_of(batch: Any, where: str) -> Any:
    requests = live(batch)
    if _fits(batch, requests):
        return batch.spec_info
    if requests:
        _say(where, batch.spec_info, len(requests))
    return plain_rows(batch, requests)


def _say(where: str, got: Any, rows: int) -> None:
    has = f" of {len(got.topk_p)} rows" if is_draft_input(got) else ""
    what = "nothing" if got is None else f"a {type(got).__name__}{has}"
    key = f"{where} {type(got).__name__}"
    if key in _said:
        return
    _said.add(key)
    logger.warning(
        "g4debug: %s: in %s_batch got %s, expected draft state for %d live requests; each goes on "
        "from its last token with a plain row. The output stays right, and the accept length is "
        "low for one step. This is logged once; SGLANG_TRTLLM_MHA_DEBUG=1 helps to find the cause",
        ID, where, what, rows,
    )  # fmt: skip


def still_broken() -> bool:
    """True if both methods use ``spec_info`` without checking what it is."""
    texts = [source(f"{BATCH}.{name}_batch") for name in ("merge", "filter")]
    return all(
        f"self.spec_info.{name}_batch" in text
        and "isinstance(self.spec_info" not in text
        and "hasattr(self.spec_info" not in text
        for name, text in zip(("merge", "filter"), texts, strict=True)
    )


FIX = Fix(
    id=ID,
    title="merging and filtering a batch first check its draft state, and repair it",
    seed="PR #22",
    upstream="none; from 0.5.14 on FROZEN_KV_MTP runs as spec v2",
    needs=">=0.5.12,<0.5.14",
    elsewhere={
        ">=0.5.14": "its FROZEN_KV_MTP, which is speculative decoding v2, keeps the state of its "
        "drafts by request and not on the batch",
    },
    still_broken=still_broken,
    hooks=(
        around("batch.merge", around_merge),
        around("batch.filter", around_filter),
    ),
    purpose="correctness",
)
