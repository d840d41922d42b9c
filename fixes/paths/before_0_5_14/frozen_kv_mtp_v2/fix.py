"""FROZEN_KV_MTP on speculative decoding v2: overlap scheduling on 0.5.12.post1 (seed PR #24).

0.5.12.post1 switches overlap scheduling off for FROZEN_KV_MTP, and its ``FrozenKVMTPWorkerV2`` is a
stub that raises. With ``SGLANG_FROZEN_KV_MTP_V2=1`` overlap scheduling stays on, and the worker of
:mod:`.worker` serves: the host launches a step while the last one still runs on the device. From
0.5.14 on SGLang has a v2 worker of its own, and none for v1.

Where v2 does not fit, the server stays on v1 and says so (:mod:`.limits`). A request that ends
inside a verify gets v1's tokens (:mod:`.ends`).

**The fence.** A scheduler that is ahead of the device must not overwrite what a running forward
still reads: rows of ``req_to_token``, and the mapping to SWA pages. 0.5.12.post1 has no fence for
that. Here the scheduling stream waits for the forward stream before the next batch is formed. It
waits right after the launch, too, if the result of a prefill is to be processed next: then the
prefix cache may give a request that runs already other pages for the same tokens. Only the device
waits; the host does not. Where SGLang itself lets the host wait before each verify on triton,
:mod:`.window_lists` does not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from g4debug.backends import names
from g4debug.fixes.base import Fix, after, around, before
from g4debug.fixes.paths.before_0_5_14.frozen_kv_mtp_v2 import ends, limits
from g4debug.fixes.source import source

ID = "frozen-kv-mtp-v2"
ALGORITHM = "FROZEN_KV_MTP"
logger = logging.getLogger("g4debug")


def around_arguments(call_next: Callable[..., None], args: Any) -> None:
    """Wraps ``ServerArgs._handle_speculative_decoding``, which switches overlap off."""
    unwanted = args.disable_overlap_schedule
    call_next(args)
    if args.speculative_algorithm != ALGORITHM:
        return
    why = "--disable-overlap-schedule" if unwanted else limits.server_limit(args)
    if why:
        logger.warning("g4debug: %s: not used, so the server stays on v1: %s", ID, why)
        return
    args.disable_overlap_schedule = False
    logger.warning(
        "g4debug: %s: overlap scheduling stays on. FROZEN_KV_MTP runs on speculative decoding v2.",
        ID,
    )


def after_supports(supports: bool, algorithm: Any) -> bool:
    """Runs after ``SpeculativeAlgorithm.supports_spec_v2``."""
    return supports or algorithm.is_frozen_kv_mtp()


def around_create_worker(call_next: Callable[..., Any], algorithm: Any, args: Any) -> Any:
    """Wraps ``SpeculativeAlgorithm.create_worker``, which returns the class of the worker."""
    if not algorithm.is_frozen_kv_mtp() or args.disable_overlap_schedule:
        return call_next(algorithm, args)
    from g4debug.fixes.paths.before_0_5_14.frozen_kv_mtp_v2.worker import Worker

    return Worker


def around_grammar(call_next: Callable[..., bool], manager: Any, request: Any) -> bool:
    """Wraps ``GrammarManager.process_req_with_grammar``: True if the request waits for one."""
    why = limits.request_limit(request) if serves(manager.scheduler) else ""
    if why:
        request.set_finish_with_abort(f"g4debug: {ID}: {why}")
        return False
    return call_next(manager, request)


def after_resolve(kept: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs after ``Scheduler._resolve_spec_overlap_tokens``."""
    return ends.after_resolve(kept, scheduler, *args, **kwargs) if serves(scheduler) else kept


def before_next_batch(scheduler: Any) -> None:
    """Runs before ``Scheduler.get_next_batch_to_run``."""
    if serves(scheduler):
        scheduler.schedule_stream.wait_stream(scheduler.forward_stream)


def after_run_batch(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs after ``Scheduler.run_batch``, which has launched a batch."""
    last = scheduler.last_batch
    if serves(scheduler) and last is not None and last.forward_mode.is_extend():
        scheduler.schedule_stream.wait_stream(scheduler.forward_stream)
    return result


def around_window_lists(call_next: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps ``update_sliding_window_buffer_cuda_graph`` of the triton backend."""
    from g4debug.fixes.paths.before_0_5_14.frozen_kv_mtp_v2 import window_lists  # it imports torch

    return window_lists.around_window_lists(call_next, *args, **kwargs)


def serves(scheduler: Any) -> bool:
    """True if FROZEN_KV_MTP runs on v2 in this scheduler."""
    return bool(scheduler.enable_overlap and scheduler.spec_algorithm.is_frozen_kv_mtp())


def still_broken() -> bool:
    """True if SGLang has no worker for FROZEN_KV_MTP with overlap scheduling."""
    create = source("sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker")
    return "FROZEN_KV_MTP does not support spec v2" in create


FIX = Fix(
    id=ID,
    title="FROZEN_KV_MTP on speculative decoding v2, with overlap scheduling",
    seed="PR #24",
    upstream="in 0.5.14 (FrozenKVMTPWorkerV2)",
    needs="==0.5.12.post1",
    elsewhere={
        ">=0.5.14": "its FROZEN_KV_MTP runs on speculative decoding v2 by itself",
        ">=0.5.13,<0.5.14": "it was not run there",
    },
    still_broken=still_broken,
    hooks=(
        around("args.speculative", around_arguments),
        after("spec.supports_v2", after_supports),
        around("spec.create_worker", around_create_worker),
        around("grammar.begin", around_grammar),
        after("result.resolve_overlap", after_resolve),
        before("scheduler.next_batch", before_next_batch),
        after("scheduler.run_batch", after_run_batch),
        around("attn.triton.window_lists", around_window_lists),
    ),
    purpose="experiment",
    switch=limits.SWITCH,
    eligible=(
        f"with --speculative-eagle-topk 1 and attention on {names(limits.BACKENDS)}; not with "
        "--disable-overlap-schedule, --enable-dp-attention, --enable-lora, custom logit "
        "processors, returned hidden states, disaggregation or pipeline parallelism. Requests "
        "with a grammar are refused"
    ),
)
