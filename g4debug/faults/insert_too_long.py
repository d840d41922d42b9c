"""Lets a request that ends hand more to the prefix cache than it has room for.

Its length counts a page too much, so the last page is what its row of ``req_to_token`` has behind
its tokens: nothing, or the page of an earlier owner. The answer stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from g4debug.faults.base import Fault, Injection
from g4debug.hooking import req_kv


def install(injection: Injection) -> None:
    from g4debug.hooking import prefix_tree  # it needs torch, and `g4debug faults` does not

    @injection.around("cache.release")
    def around_release(
        call_next: Callable[..., Any], request: Any, tree: Any, *args: Any, **kwargs: Any
    ) -> Any:
        inner = prefix_tree.innermost(tree)
        size, has = int(getattr(inner, "page_size", 1)), req_kv.allocated(request)
        # From 0.5.23 on the argument is called "checkpoint", and can only be given by name.
        given = args[0] if args else kwargs.get("is_insert", kwargs.get("checkpoint", True))
        keeps = bool(given) and hasattr(inner, "insert") and not getattr(inner, "disable", False)
        if not keeps or req_kv.row(request) < 0 or has < size or injection.fire() is None:
            return call_next(request, tree, *args, **kwargs)
        # One more than the page, because a draft's prefix cache has pairs of tokens. Its key is
        # made of the tokens, so there must be as many.
        longer, count = has // size * size + size + 1, len(request.output_ids)
        missing = max(0, longer - len(request.origin_input_ids) - count)
        request.output_ids.extend([int(request.output_ids[-1])] * missing)
        end = getattr(request, "finished_len", None)  # where it stopped: no more is handed over
        if end is not None:
            request.finished_len = count + missing
        req_kv.holder(request, req_kv.COMMITTED).kv_committed_len = longer
        injection.log(
            f"request {request.rid} hands over {longer} tokens, and it has room for {has}"
        )
        try:
            return call_next(request, tree, *args, **kwargs)
        finally:
            del request.output_ids[count:]
            if end is not None:
                request.finished_len = end


FAULT = Fault(
    id="insert-too-long",
    title="a request hands more to the prefix cache than it has",
    tasks={"on": "a page more than it has room for"},
    caught_by=("prefix-cache",),
    asks=("a prefix cache",),
)
