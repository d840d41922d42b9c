"""Says on which servers everything that can hold a page is known."""

from __future__ import annotations

from typing import Any

from g4debug.hooking.resolved import server_argument
from g4debug.sanitizer.unsupported import other_books
from g4debug.tracers.base import Context

# The prefix caches that are known here. A subclass may hold pages elsewhere (in host memory).
CACHES = ("SWARadixCache", "RadixCache", "SWAChunkCache", "ChunkCache", "UnifiedRadixCache")


def has_sessions(tree: Any) -> bool:
    """True if streaming sessions keep KV between their turns."""
    return any(getattr(one, "slots", None) for one in (tree, getattr(tree, "session", None)))


def is_counted(context: Context, scheduler: Any, why: str) -> bool:
    """Tell the status what of this server is not counted. True if some of it is.

    why: nothing is, for this reason; '' if there is none.
    """
    if why:
        context.off(why)
    elif getattr(getattr(scheduler, "req_to_token_pool", None), "mamba_pool", None) is not None:
        context.limit(
            "not the states of linear layers",
            "they lie in a pool of their own (mamba_pool), of which no book is kept",
        )
    return not why


def unusable(scheduler: Any) -> str:
    """Why this server cannot be checked, '' if it can."""
    cache = scheduler.tree_cache
    inner = getattr(cache, "inner", cache)  # a StreamingSession is wrapped around the cache
    name = type(inner).__name__
    topk = server_argument(scheduler.server_args, "speculative_eagle_topk", 1)
    # The unified cache can have a second level, in host memory or elsewhere.
    second = [n for n in ("cache_controller", "linker") if getattr(inner, n, None)]
    why = other_books(scheduler.server_args)
    if second and not why:
        why = f"it cannot check this server, whose prefix cache {name} keeps pages in a second "
        why += f"level, too (its {' and '.join(second)})"
    if not why and (name not in CACHES or topk != 1):
        why = f"it cannot check this server, whose prefix cache is {name} (known: "
        why += f"{', '.join(CACHES)}) and whose speculative_eagle_topk is {topk} (known: 1)"
    return why
