"""Leaves an idle draft input on a batch after a verify in which every request finished.

FROZEN_KV_MTP's worker puts its verify input on ``batch.spec_info`` and replaces it by a draft input
only if a request goes on (``frozen_kv_mtp_worker.py:473``). If every request finished, the
``FrozenKVMTPVerifyInput`` stays there. The next prefill is merged into that batch before the batch
is filtered. A verify input has no ``merge_batch``, so the server dies of an AttributeError. Under
DP attention the worker does make an idle input, but stores it on a *copy* of the batch (``:542``).
Then a ``FrozenKVMTPDraftExtendInput`` stays, which cannot be merged either. 0.5.13 fixed the first
case, but not the second (``:522``).

The fix acts after the worker's forward. If every request of the batch is finished and there is no
draft input, it puts an idle one (with 0 rows) on the batch, as the worker does elsewhere. From seed
PR #22.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable
from typing import Any

from g4debug.fixes.base import Fix, around
from g4debug.fixes.source import source

WORKER = "sglang.srt.speculative.frozen_kv_mtp_worker.FrozenKVMTPWorker"


def around_forward(call_next: Callable[..., Any], worker: Any, batch: Any) -> Any:
    """Wraps ``FrozenKVMTPWorker.forward_batch_generation``; ``batch`` is a ScheduleBatch."""
    from sglang.srt.speculative.frozen_kv_mtp_info import FrozenKVMTPDraftInput

    result = call_next(worker, batch)
    left = batch.spec_info
    if not isinstance(left, FrozenKVMTPDraftInput) and all(r.finished() for r in batch.reqs):
        batch.spec_info = idle_input(worker, batch)
    return result


def idle_input(worker: Any, batch: Any) -> Any:
    """A FrozenKVMTPDraftInput of 0 rows, with the shapes that ``worker`` uses for its own."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative.frozen_kv_mtp_info import FrozenKVMTPDraftInput

    return FrozenKVMTPDraftInput.create_idle_input(
        device=batch.device,
        hidden_size=worker._recurrent_hidden_size,
        dtype=worker.model_config.dtype,
        topk=worker.topk,
        capture_hidden_mode=CaptureHiddenMode.LAST,
    )


def still_broken() -> bool:
    """True if no idle input is made when all requests finished, or only on a copy of the batch."""
    forward = source(f"{WORKER}.forward_batch_generation")
    branches = [
        node
        for node in ast.walk(ast.parse(textwrap.dedent(forward)))
        if isinstance(node, ast.If) and "draft_extend_input" in ast.unparse(node.test)
    ]
    extend = source(f"{WORKER}.forward_draft_extend_after_decode")
    return any(not node.orelse for node in branches) or "batch = batch.copy()" in extend


FIX = Fix(
    id="idle-draft-input",
    title="after a verify in which every request finished, the batch has an idle draft input",
    seed="PR #22",
    upstream="in 0.5.13 (FrozenKVMTPWorker._draft_preprocess_idle), not under DP attention",
    needs=">=0.5.12,<0.5.14",
    elsewhere={
        ">=0.5.14": "its FROZEN_KV_MTP, which is speculative decoding v2, leaves no verify input "
        "on a batch",
    },
    still_broken=still_broken,
    hooks=(around("worker.forward", around_forward),),
    purpose="correctness",
)
