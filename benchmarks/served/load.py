"""Answers a question with the rows of its requests, which are streamed to time every token:

    {"serve": BATCH, "seed": S, "count": N, "tokens": T or 0, "prompt": P or 0}
        N requests of measuring/load.py, BATCH at a time: when one is done, the next is sent. With
        "prompt", each has a prompt of P tokens that shares nothing with another.
    {"tree": TRUNKS, "pages": P, "page_size": Z, "seed": S}
        requests that give the prefix cache about 2 x TRUNKS x P nodes
    {"flush": true}
        empty the prefix cache
    {"edges": DELAYS_MS, "seed": S, "count": N, "length": L, "tokens": T}
        N requests, one after the other. Each is sent one of the delays after the last token of the
        request before it, which is when the server becomes idle.

A question may have "vocab", where the model's vocabulary is not the one of measuring/load.py.
"""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from harness.engine import flush, greedy
from measuring import load
from measuring.load import Request


async def ask(engine: Any, request: Request, began: float) -> dict[str, Any]:
    """Send a request and time its tokens. Times are ms; sent and end count from ``began``.

    step_ms is the median of the times between two parts of the answer. It is the time of a decode
    step: steps that waited for another request's prefill are fewer, and do not count.
    """
    sent = time.perf_counter()
    stream = await engine.async_generate(
        input_ids=request.prompt, sampling_params=greedy(request.tokens), stream=True
    )
    first = last = 0.0
    in_first, meta = 0, {}
    came = []
    async for chunk in stream:
        last = time.perf_counter()
        came.append(last)
        meta = chunk["meta_info"]
        if not first:
            first, in_first = last, meta["completion_tokens"]
    rest = meta["completion_tokens"] - in_first
    steps = [after - before for before, after in pairwise(came)]
    return {
        "sent_ms": round((sent - began) * 1000, 3),
        "ttft_ms": round((first - sent) * 1000, 4),
        "tpot_ms": round((last - first) * 1000 / rest, 5) if rest else "",
        "step_ms": round(statistics.median(steps) * 1000, 5) if steps else "",
        "end_ms": round((last - began) * 1000, 3),
        "prompt": len(request.prompt),
        "cached": meta["cached_tokens"],
        "tokens": meta["completion_tokens"],
        "verifies": meta.get("spec_verify_ct", ""),
    }


async def closed_loop(engine: Any, requests: list[Request], batch: int) -> list[Any]:
    """Rows of all requests in the order in which they were sent."""
    gc.collect()
    rows: list[Any] = [None] * len(requests)
    waiting: Iterator[tuple[int, Request]] = iter(enumerate(requests))
    began = time.perf_counter()

    async def client() -> None:
        for number, request in waiting:
            rows[number] = {"number": number, **await ask(engine, request, began)}

    await asyncio.gather(*(client() for _ in range(batch)))
    return rows


async def rows_of(engine: Any, shape: load.Shape, question: dict[str, Any]) -> list[Any]:
    seed = question["seed"]
    shape = replace(shape, vocab=question.get("vocab", shape.vocab))
    if "serve" in question:
        count, tokens = question["count"], question.get("tokens", 0)
        if question.get("prompt"):
            requests = load.alone(shape, seed, count, question["prompt"], tokens)
        else:
            requests = load.requests(shape, seed, count, tokens)
        return await closed_loop(engine, requests, question["serve"])
    if "tree" in question:
        size = question["page_size"]
        trunks = load.trunks(shape.vocab, seed, question["tree"], question["pages"], size)
        await closed_loop(engine, [Request(t, 1) for t in trunks], 64)
        for number, trunk in enumerate(trunks):
            twigs = load.twigs(trunk, shape.vocab, seed + 1 + number, size)
            await closed_loop(engine, [Request(t, 1) for t in twigs], 64)
        return []
    return await edges(engine, shape, question)


async def edges(engine: Any, shape: load.Shape, question: dict[str, Any]) -> list[Any]:
    rng = random.Random(question["seed"])
    ids, rows = range(4, shape.vocab), []
    began = time.perf_counter()
    for number in range(question["count"]):
        delay = rng.choice(question["edges"])
        prompt = [2, *rng.choices(ids, k=question["length"] - 1)]
        until = time.perf_counter() + delay / 1000
        while time.perf_counter() < until:  # asyncio.sleep would come back up to 1 ms late
            await asyncio.sleep(0)
        row = await ask(engine, Request(prompt, question["tokens"]), began)
        rows.append({"number": number, "delay_ms": delay, **row})
    return rows


def answer(engine: Any, device: str, question: dict[str, Any]) -> dict[str, Any]:
    if "flush" in question:
        flush(engine)
        return {"rows": []}
    found = engine.loop.run_until_complete(rows_of(engine, load.SHAPES[device], question))
    return {"rows": found}
