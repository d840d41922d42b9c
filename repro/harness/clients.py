"""Requests as clients send them: each on its own, and some clients go away.

SGLang then aborts what runs or waits, as it does when a connection breaks. Nothing is injected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

GOES_AT_ONCE, GOES_LATER = 25, 12  # every so many requests


def serve(
    engine: Any, rids: Sequence[str], prompts: Sequence[Sequence[int]], sampling: Sequence[Any]
) -> list[dict[str, Any]]:
    """The outputs of these requests, each sent on its own, in this order.

    engine: ``sgl.Engine``. Every 25th client goes before its first token, every twelfth when it
    has half of its answer. What such a one has got by then is its output, ended by "abort".
    """

    async def all_of_them() -> list[dict[str, Any]]:
        return await asyncio.gather(
            *(
                _one(engine, number, rid, prompt, wanted)
                for number, (rid, prompt, wanted) in enumerate(
                    zip(rids, prompts, sampling, strict=True)
                )
            )
        )

    found: list[dict[str, Any]] = engine.loop.run_until_complete(all_of_them())
    return found


def leaves_after(number: int, tokens: int) -> int | None:
    """How many tokens of its answer the client of a request waits for; None for all of them."""
    if number % GOES_AT_ONCE == GOES_AT_ONCE - 1:
        return 0
    return max(1, tokens // 2) if number % GOES_LATER == GOES_LATER - 1 else None


async def _one(
    engine: Any, number: int, rid: str, prompt: Sequence[int], wanted: Mapping[str, Any]
) -> dict[str, Any]:
    leaves = leaves_after(number, wanted["max_new_tokens"])
    chunks = await engine.async_generate(
        input_ids=list(prompt), rid=rid, sampling_params=dict(wanted), stream=True
    )
    last: dict[str, Any] = {}
    if leaves == 0:
        asyncio.get_running_loop().call_later(0.2, abort, engine, rid)
    async for last in chunks:
        if leaves and len(last["output_ids"]) >= leaves:
            abort(engine, rid)
            leaves = None  # it goes once
    return last


def abort(engine: Any, rid: str) -> None:
    engine.tokenizer_manager.abort_request(rid=rid)
