"""A request that ends inside a verify gets the tokens up to its end, as with v1.

v1 looks after every accepted token whether the request ends there. SGLang's v2 (0.5.12.post1) gives
a request all tokens that a verify accepted and looks once. So three things differ: an end token
before the last one that ``max_new_tokens`` allows is not the reason any more, what comes after a
stop string is sent, and a stop string may lie so far back that it is not seen at all.

So here the accepted tokens are cut at the first one that ends the request, when the result is
resolved. The tokens behind it are not committed either: their pages were allocated ahead, and
SGLang frees such pages when the request ends.
"""

from __future__ import annotations

from typing import Any


def after_resolve(
    kept: list[list[int]], scheduler: Any, result: Any, batch: Any, *args: Any, **kwargs: Any
) -> list[list[int]]:
    """Runs after ``_resolve_spec_overlap_tokens``: kept has the accepted tokens of each request."""
    for row, request in enumerate(batch.reqs):
        if request.finished() or request.is_retracted:
            continue
        tokens = kept[row]
        end = ends_after(request, tokens)
        if end < len(tokens):
            request.kv_committed_len -= len(tokens) - end
            kept[row] = tokens[:end]
    return kept


def ends_after(request: Any, tokens: list[int]) -> int:
    """How many of these tokens a ``Req`` is given: all, or up to the one with which it ends.

    The request is left as it is.
    """
    params = request.sampling_params
    written = params.stop_strs or getattr(params, "stop_regex_strs", None)
    if not written and not _ends(request, tokens, len(tokens)):
        return len(tokens)
    for count in range(1, len(tokens)):
        if _ends(request, tokens[:count], 1):
            return count
    return len(tokens)


def _ends(request: Any, tokens: list[int], new: int) -> bool:
    """True if SGLang ends a request that has these tokens, of which the last ``new`` are new."""
    before = len(request.output_ids)
    to_finish, length = request.to_finish, request.finished_len
    request.output_ids.extend(tokens)
    try:
        request.check_finished(new)
        return bool(request.finished())
    finally:
        del request.output_ids[before:]
        request.finished_reason, request.finished_len = None, length
        request.to_finish = to_finish
