"""Other page sizes, KV types, models and schedules."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from g4debug.hooking import targets
from suites.healthy.groups.endings import shared_prefix
from suites.healthy.workload import (
    Client,
    Group,
    cached,
    finish,
    require,
    with_mtp,
    without_mtp,
    workload,
)


@workload("batches", "32 requests, half with common prefixes, in four waves")
async def batches(client: Client) -> None:
    prefix = client.prompt(200)
    for _ in range(4):
        found = await client.together(
            *(
                client.generate(prefix[: client.between(30, 200)] + client.tokens(20), 40)
                for _ in range(4)
            ),
            *(
                client.generate(client.prompt(client.between(2, 500)), client.between(2, 60))
                for _ in range(4)
            ),
        )
        client.note("answers", sum(finish(o) == "length" for o in found))
        await asyncio.sleep(0.1)


@workload("beyond the window", "220 tokens decoded, window 128")
async def outgrown(client: Client) -> None:
    """Sequences that outgrow the window while they decode, so that SWA pages are evicted."""
    found = await client.together(
        *(client.generate(client.prompt(length), 220) for length in (100, 130, 250))
    )
    client.note("sequences that outgrew the window", sum(finish(o) == "length" for o in found), 3)


@workload("a few tokens", "six requests, in two waves")
async def few_tokens(client: Client) -> None:
    """Little, because interpreted attention kernels take seconds for each step."""
    prompt = client.prompt(140)
    for _ in range(2):
        found = await client.together(
            client.generate(prompt, 5),
            client.generate(client.prompt(30), 6),
            client.generate(client.prompt(70), 3),
        )
        client.note("answers", len(found))


@workload("prompts that come back", "six prompts, and again with more tokens")
async def reused(client: Client) -> None:
    prompts = [client.prompt(client.between(100, 400)) for _ in range(6)]
    await client.together(*(client.generate(p, 20) for p in prompts))
    found = await client.together(*(client.generate(p + client.tokens(8), 20) for p in prompts))
    require(all(finish(o) == "length" for o in found), "a request did not complete")
    client.note("prompts that came back longer", len(found), 6)
    client.note("prompt tokens from the prefix cache", sum(map(cached, found)), 0)


def _moe(folder: Path, model: str) -> Mapping[str, Any]:
    from g4debug.cpu.geometry import TINY_MOE
    from g4debug.cpu.models import write

    target, assistant = write(TINY_MOE, folder / "moe")
    return {"model_path": str(target), "speculative_draft_model_path": str(assistant)}


ALL = (batches, outgrown, reused)
NO_TABLES = {"page-table": "on torch_native it was run on 0.5.23 only"}
# torch_native reads sliding layers at full-pool indices, so freed memory decides what it answers.
# With pools of the same size it reads no index that is not there.
NATIVE = {"attention_backend": "torch_native", "swa_full_tokens_ratio": 1.0}
ANY_ANSWERS = tuple(dataclasses.replace(w, compare=False) for w in ALL)
NO_NATIVE = "got prefill=torch_native, decode=torch_native"
# What SGLang says of KV in fp8 on a CPU, from the release on that is named; before, it serves it.
NO_FP8 = {
    ">=0.5.23": "ValueError: CPU FP8 KV cache requires Intel AMX support.",
    ">=0.5.18": "RuntimeError: Unsupported dtype torch.float32. Supported: bfloat16, float16",
}
OVERLAP = {}
if targets.matches("<0.5.13"):
    OVERLAP["kv-integrity"] = "with overlap scheduling, KV of ended requests is still written"
elif not targets.has_war_barrier():
    OVERLAP["kv-integrity"] = "with overlap scheduling, pages move while a forward reads them"


def _native(size: int, radix: bool) -> Group:
    return without_mtp(
        f"page-{size}-native" + ("" if radix else "-no-radix"),
        f"page size {size}, attention in torch, " + ("" if radix else "no ") + "prefix cache",
        ANY_ANSWERS,
        {**NATIVE, "page_size": size, "disable_radix_cache": not radix},
        idle=NO_TABLES,
        refused="" if targets.matches("<0.5.13") else NO_NATIVE,
    )


GROUPS = (
    with_mtp("page-16", "page size 16, MTP", ALL, {"page_size": 16}),
    without_mtp("page-16-plain", "page size 16, no MTP", ALL, {"page_size": 16}),
    with_mtp("page-32", "page size 32, MTP", ALL, {"page_size": 32}),
    _native(1, True),
    _native(1, False),
    _native(2, True),
    _native(8, False),
    Group(
        "page-1-mtp",
        "page size 1, attention in interpreted Triton kernels, MTP",
        (few_tokens,),
        {"attention_backend": "triton", "page_size": 1},
    ),
    with_mtp(
        "fp8",
        "KV in fp8_e4m3, MTP",
        (few_tokens,),
        {"kv_cache_dtype": "fp8_e4m3"},
        refused=next((words for since, words in NO_FP8.items() if targets.matches(since)), ""),
    ),
    with_mtp("bf16", "model and KV in bfloat16, MTP", (*ALL, shared_prefix), {"dtype": "bfloat16"}),
    with_mtp(
        "moe", "a model with experts, MTP", ALL, prepare=_moe, only="it is Gemma-4 with experts"
    ),
    without_mtp(
        "overlap",
        "overlap scheduling, no MTP",
        (*ALL, shared_prefix),
        {"disable_overlap_schedule": False},
        idle=OVERLAP,
    ),
)
