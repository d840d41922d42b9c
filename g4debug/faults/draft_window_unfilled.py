"""Leaves the draft's sliding layers on triton without their list of tokens.

In upstream #29858 (open since 2026-07-01) a draft that runs as an extend in a CUDA graph fills in
the list of its full layers before a replay, and not the list of its sliding layers; up to 0.5.21
the graph has none at all. 0.5.23 fills in both. Gemma-4's FROZEN_KV_MTP never meets it, because its
draft runs as a decode, for which every release fills in both lists.

This fault puts the draft's decode into that state. Once SGLang has filled in the list of the
sliding layers, it is overwritten with what a captured graph finds there if nobody does: zeros, the
list of the capture itself. So the sliding layers read token 0 of their pool, which takes the writes
of padding, as often as they should read the window. Without CUDA graphs the same is done to the
list of each draft.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g4debug.faults.base import Fault, Injection

if TYPE_CHECKING:
    from g4debug.hooking.hooks import Hooks


def install(hooks: Hooks, injection: Injection) -> None:
    from g4debug.hooking.hooks import Order

    drafts: set[int] = set()

    def after_init(result: Any, backend: Any, model_runner: Any, *args: Any, **kw: Any) -> Any:
        if getattr(model_runner, "is_draft_worker", False):
            drafts.add(id(backend))
        return result

    def after_metadata(result: Any, backend: Any, batch: Any, *args: Any, **kw: Any) -> Any:
        if id(backend) in drafts and batch.forward_mode.is_decode():
            unfill(backend.forward_metadata.window_kv_indices, "decode")
        return result

    def after_replay(result: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        if id(backend) in drafts and _is_replay_of_a_decode(args, kwargs):
            unfill(getattr(backend, "cuda_graph_window_kv_indices", None), "replay")
        return result

    def unfill(tokens: Any, mode: str) -> None:
        """tokens: int64, the list of the sliding layers, of all rows."""
        if tokens is not None and len(tokens) and injection.fire(mode=mode):
            tokens.zero_()
            injection.log(f"draft {mode}: the list of the sliding layers is left as it was made")

    owner = injection.fault.id
    hooks.after("attn.triton.init", Order.FAULT, owner, after_init)
    hooks.after("attn.triton.metadata", Order.FAULT, owner, after_metadata)
    hooks.after("attn.triton.metadata_replay", Order.FAULT, owner, after_replay)


def _is_replay_of_a_decode(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Up to 0.5.12 the arguments are those of a replay alone, later a ForwardBatch and a flag."""
    given = (*args, *kwargs.values())
    mode = next(getattr(a, "forward_mode", a) for a in given if _has_mode(a))
    captures = kwargs.get("in_capture", len(args) == 2 and args[1] is True)
    return bool(mode.is_decode()) and not captures


def _has_mode(argument: Any) -> bool:
    return hasattr(argument, "forward_mode") or hasattr(argument, "is_decode")


FAULT = Fault(
    id="draft-window-unfilled",
    title="on triton, the draft's sliding layers get a list of tokens that nobody has filled in",
    tasks={"on": "leave the list of the draft's sliding layers as it was made"},
    caught_by=("page-table",),
    install=install,
    selectors=("mode",),
    drills=("on",),
    backend="triton",
)
