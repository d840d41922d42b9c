"""The limits that several tracers share: the reasons why they do not judge on some servers."""

from __future__ import annotations

from typing import Any

from g4debug.hooking import targets
from g4debug.hooking.older import older_module
from g4debug.hooking.resolved import dp_attention, server_argument
from g4debug.tracers.base import Context

# The limits in the status of page-table for a backend, or a phase of serving, that it does not look
# at. The other backends and phases can still be called innocent.
BACKEND = "nothing that the attention backend {} hands to its kernels is judged"
PHASE = "nothing that attention reads in {} is judged"


def tell_of_later_sizes(context: Context, scheduler: Any) -> None:
    """Limit the ranges of a tracer where SGLang gives its pools their size after its graphs."""
    runner = getattr(getattr(scheduler, "tp_worker", None), "model_runner", None)
    if getattr(getattr(runner, "token_to_kv_pool", None), "post_capture_active", False):
        context.limit(
            "not what is behind the end of a pool, but before the largest that it might have had",
            "with SGLANG_ENABLE_POST_CAPTURE_KV_SIZING a pool gets its size after the CUDA graphs, "
            "and this tracer was never run so",
        )


def overlaps(server_args: Any) -> bool:
    """True if the scheduler works on the next batch while a forward runs."""
    return not server_argument(server_args, "disable_overlap_schedule")


def takes_snapshots(server_args: Any) -> bool:
    """True if a forward on this server can be judged by the truth at its launch.

    The scheduler overlaps, and SGLang has a barrier behind which it changes what a forward still
    has to read. Without it a forward may translate its rows by a mapping that is another's already.
    """
    if not overlaps(server_args):
        return False
    older = older_module(__name__)
    return targets.has_war_barrier() or bool(older and older.waits_as_well(server_args))


def other_rows(server_args: Any) -> str:
    """Why the hand-overs of a forward to its kernels are not judged on this server; '' if they are.

    With these arguments a forward has other rows, or other indices in them, than SGLang's requests
    have, and no tracer was ever run with them. DP attention pads each rank's batch to the longest
    (``ForwardBatch.prepare_mlp_sync_batch``); each rank's allocators stay its own.
    """
    if dp_attention(server_args):
        return (
            "with DP attention a batch is padded to those of the other ranks, and "
            "this tracer was never run so"
        )
    if server_argument(server_args, "attn_cp_size", 1) > 1:
        return (
            "with context parallelism each rank reads a part of a prompt, by a table of its own, "
            "and this tracer was never run so"
        )
    return other_indices(server_args)


def other_indices(server_args: Any) -> str:
    """Why neither tables nor allocators are judged on this server; '' if they are.

    With these arguments a kernel gets other indices than those that SGLang's rows and allocators
    have, and no tracer was ever run with them.
    """
    if server_argument(server_args, "enable_unified_memory"):
        return (
            "with --enable-unified-memory a kernel gets other indices than req_to_token has, and "
            "this tracer was never run so"
        )
    if server_argument(server_args, "dcp_size", 1) > 1:
        return (
            "with decode context parallelism each rank has a part of each sequence, and "
            "this tracer was never run so"
        )
    return ""


def other_books(server_args: Any) -> str:
    """Why the allocators and their pages are not judged on this server; '' if they are."""
    if server_argument(server_args, "pp_size", 1) > 1:
        return (
            "with pipeline parallelism several batches run at once, and "
            "this tracer was never run so"
        )
    return other_indices(server_args)


def other_prefixes(server_args: Any) -> str:
    """Why the prefix cache may rightly have other pages than a request's row; '' if it may not."""
    if server_argument(server_args, "disaggregation_mode", "null") != "null":
        return (
            "prefill and decode are disaggregated: a request that was retracted keeps pages of its "
            "own on 0.5.15, and it was never run so"
        )
    if server_argument(server_args, "enable_pdmux"):
        return "--enable-pdmux runs prefill beside decode, on streams that do not wait"
    if server_argument(server_args, "dllm_algorithm"):
        return "a diffusion model writes its row anew, and it was never run so"
    return ""


def moving_pages(server_args: Any, by_snapshot: bool = False) -> list[str]:
    """Why it cannot be judged on this server which page belongs where; empty if it can.

    by_snapshot: who asks judges by what was true when the forward was launched, so overlap
    scheduling does not matter.

    Pages change hands while a forward reads them. With overlap scheduling, for instance, a request
    that ended in the last step is still part of the forward that runs, while its pages and its row
    are given to another request. With pipeline parallelism SGLang switches overlap scheduling off,
    but its forwards have a stream of their own all the same, and it prepares the next chunk of a
    prompt, for which it may exchange pages in the request's row, while the last chunk still runs.
    """
    found = []
    if overlaps(server_args) and not by_snapshot:
        found.append(
            "with overlap scheduling, pages change hands while a forward reads them; start with "
            "--disable-overlap-schedule to have everything checked"
        )
    if server_argument(server_args, "disaggregation_mode", "null") != "null":
        found.append("prefill and decode are disaggregated, so pages are filled by another server")
    if server_argument(server_args, "enable_pdmux"):
        found.append(
            "--enable-pdmux runs prefill beside decode; start without it to have everything checked"
        )
    if server_argument(server_args, "pp_size", 1) > 1:
        found.append("with pipeline parallelism several batches run at once")
    return found
