"""Draws a healthy server and its traffic at random: the same for a seed, each time.

Like every fuzzer, it finds by chance the cases that nobody thought of. It draws only servers that
SGLang accepts for the model, and pools that can hold the requests, so that a server has no reason
to stop or to stand.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException

from g4debug import discovery
from g4debug.cpu import drafts, toys
from g4debug.cpu.server import DEFAULT
from g4debug.hooking import targets
from suites.healthy.workload import Client, require

PAGES = (1, 16, 64, 64, 64)  # 64 is what trtllm_mha takes by itself
SWA_ROOM = 256  # tokens of the SWA pool beside the longest prompt, which some releases lock whole
BURSTS = 4
PATIENCE = 120.0  # seconds that one request may take
# There the CPU engine has no stand-in for the kernels that sample a verify.
GREEDY_WITH_MTP = targets.matches(">=0.5.14,<0.5.18")


# The newest, the only one on which the CPU engine was seen to serve drafts beside FROZEN_KV_MTP.
SERVES_DRAFTS = targets.matches(">=0.5.23")


@dataclass(frozen=True)
class Shape:
    """A server. mtp: with FROZEN_KV_MTP. engine: arguments of ``sgl.Engine``. model: a toy. draft:
    the name of another draft than FROZEN_KV_MTP, '' for none.
    """

    mtp: bool
    engine: Mapping[str, Any]
    model: str = DEFAULT
    draft: str = ""

    @property
    def speculates(self) -> bool:
        return self.mtp or bool(self.draft)

    @property
    def words(self) -> str:
        told = [f"{k}={v}" for k, v in self.engine.items() if v is not None]
        model = [] if self.model == DEFAULT else [self.model]
        return ", ".join([*model, self.draft or ("MTP" if self.mtp else "no MTP"), *told])


def model_of(seed: int) -> str:
    """The model of a seed, where models are drawn, too.

    Each model draws a number, and the greatest wins: a toy that is added takes some seeds, and the
    others have the model that they had.
    """
    return _greatest(discovery.names("toy"), f"model {seed}")


def draft_of(seed: int, model: str) -> str:
    """The draft of a seed, for a toy without one of its own; '' if there is none for it."""
    found = [n for n in discovery.names("draft") if model in discovery.load("draft", n).targets]
    return _greatest(found, f"draft {seed}") if found and SERVES_DRAFTS else ""


def _greatest(names: Sequence[str], of: str) -> str:
    return max(names, key=lambda name: random.Random(f"{of} {name}").random())


def draw(seed: int, model: str = DEFAULT) -> Shape:
    """The server of a seed with a model."""
    dice, toy = random.Random(seed), toys.load(model)
    speculates, page = dice.random() < 0.7, dice.choice(PAGES)
    mtp = speculates and bool(toy.draft)
    draft = draft_of(seed, model) if speculates and not mtp else ""
    if "triton" not in toy.backends:
        page = 64
    total = dice.choice((1024, 2048, 4096, 8192))
    least = longest_prompt(total) + SWA_ROOM
    ratios = [r for r in (0.2, 0.3, 0.5, 0.8, 1.0) if total * r >= least]
    engine: dict[str, Any] = {
        "page_size": page,
        "max_total_tokens": total,
        "swa_full_tokens_ratio": dice.choice(ratios),
        "max_running_requests": dice.choice((1, 2, 4, 8)),
        "chunked_prefill_size": dice.choice((64, 128, 256, 512, 2048)),
    }
    backend = "triton" if page != 64 else dice.choice(("trtllm_mha", "triton", "split"))
    if not {"trtllm_mha", "triton"} <= {*toy.backends}:
        backend = toy.backends[0]
    if backend == "split":
        engine |= {
            "attention_backend": None,
            "prefill_attention_backend": "triton",
            "decode_attention_backend": "trtllm_mha",
        }
    else:
        engine["attention_backend"] = backend
    if dice.random() < 0.15:
        engine["disable_radix_cache"] = True
    if dice.random() < 0.2:
        engine["enable_mixed_chunk"] = True
    if not mtp and not draft and dice.random() < 0.3:
        engine["disable_overlap_schedule"] = True
    if dice.random() < 0.2:
        engine |= {"enable_priority_scheduling": True, "schedule_policy": "fcfs"}
    elif dice.random() < 0.4:
        engine["schedule_policy"] = dice.choice(("lpm", "random", "fcfs", "dfs-weight", "lof"))
    if dice.random() < 0.3:
        engine["schedule_conservativeness"] = dice.choice((0.1, 0.3, 1.5))
    most = _most_steps(draft, model) if draft else 4 if mtp else 0
    if most and dice.random() < 0.5:
        steps = min(dice.choice((1, 2, 3, 4)), most)
        engine |= {
            "speculative_num_steps": steps,
            "speculative_num_draft_tokens": steps + 1,
            "speculative_eagle_topk": 1,
        }
    if dice.random() < 0.15:
        engine["radix_eviction_policy"] = dice.choice(("lru", "lfu"))
    return Shape(mtp, engine, model, draft)


def _most_steps(draft: str, model: str) -> int:
    """The steps of a draft, which may have a layer for each; 0 if it knows no steps."""
    return int(drafts.load(draft, model).arguments.get("speculative_num_steps", 0))


def longest_prompt(total: int) -> int:
    """In tokens, for a full pool of so many."""
    return min(900, total // 3)


async def drive(client: Client, shape: Shape, seed: int) -> None:
    """Bursts of requests, some with a shared beginning, some aborted, and flushes in between.

    Raises NotExercised if SGLang refused most of them, and TimeoutError if one had no answer.
    """
    dice = random.Random(f"traffic {seed}")
    total = int(shape.engine["max_total_tokens"])
    longest = longest_prompt(total)
    shared = [client.prompt(dice.randint(10, longest // 2)) for _ in range(4)]
    greedy = shape.speculates and GREEDY_WITH_MTP

    async def request(name: str, chance: float) -> None:
        """Drawn by its name and ``chance``, whatever runs beside it."""
        dice = random.Random(f"{name} {chance}")
        await asyncio.sleep(dice.random() * dice.choice((0.0, 0.3, 2.0)))
        start = dice.choice(shared) if dice.random() < 0.6 else [2]
        prompt = start[: dice.randint(1, len(start))] + client.tokens(dice.randint(1, longest // 2))
        tokens = min(dice.choice((1, 2, 5, 20, 60, 120)), total // 4)
        sampling: dict[str, Any] = {}
        if not greedy and dice.random() < 0.2:
            sampling["temperature"] = 1.0
        if dice.random() < 0.15:
            sampling["ignore_eos"] = False
        if dice.random() < 0.07:
            sampling["n"] = 2
        asked = client.start(prompt, tokens, sampling=sampling, name=name)
        if "n" not in sampling and dice.random() < 0.12:
            await asyncio.sleep(dice.random() * 1.5)
            client.manager.abort_request(rid=name)
            client.note("aborts", 1)
        try:
            await asyncio.wait_for(asked, PATIENCE)
        except HTTPException:  # SGLang gives up one that even an empty batch has no room for
            client.note("refused", 1)

    for burst in range(BURSTS):
        many = dice.randint(3, 16)
        await client.together(*(request(f"{burst}-{n}", dice.random()) for n in range(many)))
        if dice.random() < 0.3:
            await client.manager.flush_cache()
            client.note("flushes", 1)
        await asyncio.sleep(0.5)  # idle: everything is counted then
    refused = client.facts.get("refused", 0)
    require(refused * 2 < client.requests, f"{refused} of {client.requests} requests were refused")
