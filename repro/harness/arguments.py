"""SGLang's arguments, as the installed release has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from g4debug.fixes.source import exists, source
from g4debug.speculation import adapter

# Both since 0.5.14.
RENAMED = {
    "cuda_graph_bs": "cuda_graph_bs_decode",
    "cuda_graph_max_bs": "cuda_graph_max_bs_decode",
    "disable_piecewise_cuda_graph": "disable_prefill_cuda_graph",
}


def as_named_here(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``sgl.Engine`` by the names that this SGLang has for them; imports SGLang."""
    from sglang.srt.server_args import ServerArgs

    names = set(getattr(ServerArgs, "__struct_fields__", ()) or ServerArgs.__annotations__)
    return {n if n in names else RENAMED.get(n, n): v for n, v in arguments.items()}


def mtp_has_overlap() -> bool:
    """True if FROZEN_KV_MTP runs under overlap scheduling, as from 0.5.14 on.

    SGLang 0.5.23 dies if overlap is switched off with it (upstream #40155).
    """
    return adapter("FROZEN_KV_MTP").overlap


def keeps_whole_prompts() -> bool:
    """True if a running request keeps the SWA pages of its whole prompt until it decodes.

    The prefix cache that 0.5.18 made the default gives them back while the prompt is computed.
    """
    chooser = "sglang.srt.mem_cache.registry"
    return not exists(chooser) or "return SWARadixCache(" in source(chooser)


def blocks_are_adjacent() -> bool:
    """True if torch puts large blocks of GPU memory side by side, so that no hole follows a pool.

    Measured on a H200: with torch 2.11 they begin 32 MiB apart, with torch 2.14.1 at the next
    multiple of 2 MiB.
    """
    import torch
    from packaging.version import Version

    return Version(torch.__version__).release >= (2, 14)
