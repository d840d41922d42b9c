"""The bugs that were looked at for the suite and are no case of it, and why."""

from __future__ import annotations

from typing import Final

# threads -> why. From the text of the threads. The list is older than the first run, but git has it
# from two days after it on, and does not prove that.
LEFT_OUT: Final = {
    ("#29858",): "it needs multi-layer EAGLE (MiMo); what it would do to Gemma-4 is the fault "
    "`draft-window-unfilled`",
    ("#28569",): "closed, and its cause was never named, so no ground truth can be written",
    ("#38319", "#38355"): "it needs the cache of a Mamba model, and the fix is not merged",
    ("#27586", "#33656", "#24869"): "they need HiCache, with which nothing here was run",
    ("#25805",): "it needs disaggregated prefill and decode",
    ("#23392", "#22819"): "no cause is known",
    ("#35501",): "the lines that it talks of were not found in a release",
    ("#29860",): "in reserve: three flags together, and a window that is shorter than a page",
    ("#26380",): "in reserve: a race on a GPU in 0.5.12.post1 with overlap scheduling, where case "
    "11 is a race already",
}
