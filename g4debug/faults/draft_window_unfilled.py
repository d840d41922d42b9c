"""Leaves the draft's sliding layers on triton without their list of tokens.

In upstream #29858 (open since 2026-07-01) a draft that runs as an extend in a CUDA graph fills in
the list of its full layers before a replay, and not the list of its sliding layers; up to 0.5.21
the graph has none at all. 0.5.23 fills in both. Gemma-4's FROZEN_KV_MTP never meets it, because its
draft runs as a decode, for which every release fills in both lists.

This fault puts a draft into that state: its decode, or the extend by which multi-layer EAGLE
drafts. Once SGLang has filled in the list of the sliding layers, it is overwritten with what a
captured graph finds there if nobody does: zeros, the list of the capture itself. So the sliding
layers read token 0 of their pool, which takes the writes of padding, as often as they should read
the window. Without CUDA graphs the same is done to the list of each draft.
"""

from __future__ import annotations

from g4debug.backends.base import ListAdapter
from g4debug.faults import lists
from g4debug.faults._metadata import Made, watch
from g4debug.faults.base import Fault, Injection

# Beside a decode. A draft in a graph is one of both.
DRAFTS = ("draft_extend_v2", "replay")


def install(injection: Injection) -> None:
    @watch(injection, ListAdapter)
    def act(made: Made) -> None:
        drafts = made.decode or made.mode in DRAFTS
        if made.runner != "draft" or not drafts or made.mode == "capture":
            return
        found = made.adapter.all_lists(made.backend, made.static)
        tokens, _ = found.get("window", (None, None))
        if tokens is not None and len(tokens) and injection.fire(mode=made.mode):
            tokens.zero_()
            injection.log(
                f"draft {made.mode}: the list of the sliding layers is left as it was made"
            )


FAULT = Fault(
    id="draft-window-unfilled",
    title=f"on {lists.drilled()}, the draft's sliding layers get a list of tokens "
    "that nobody has filled in",
    tasks={"on": "leave the list of the draft's sliding layers as it was made"},
    caught_by=("page-table",),
    asks=("a draft", "a SWA pool"),
    selectors=("mode",),
    drills=("on",),
    backend=lists.drilled(),
)
