"""Servers whose SWA pool is smaller than two chunks: whoever stands there must be told.

Such a server may stand: SGLang's scheduler goes round, and no request gets on. Half of the servers
run without the fixes. A request without an answer, while nobody else gets one either, must be told
by the flight recorder, as ``hang`` or ``starved``; and a server on which each request got its
answer must not have been accused. Both are checks of the same thing from its two sides.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

from fastapi import HTTPException
from harness.engine import running
from harness.processes import Outcome
from harness.tracers import RECORDS, says_it_stands
from harness.verdicts import not_completed

from g4debug.dumps import reading
from suites.fuzz.draw import Shape
from suites.healthy.run import launch
from suites.healthy.workload import Client

MODULE = "suites.fuzz.narrow"
BURSTS = 4
TIMEOUT = 400.0  # seconds of one server
HANG = 5  # seconds; G4DEBUG_HANG_SECONDS
# Seconds without an answer to anybody, after which a server stands. Every answer takes a few steps,
# and a step on a busy machine a second or two.
STANDS = 45.0
LONGEST = 1900  # tokens of a prompt; the toy model takes 2,048 with the answer


def draw(seed: int) -> Shape:
    """A server with a SWA pool of less than two chunks, but of more than one."""
    dice = random.Random(f"narrow {seed}")
    mtp, page = dice.random() < 0.5, dice.choice((1, 64, 64))
    chunk = dice.choice((256, 384, 512))
    swa = int(chunk * dice.uniform(1.1, 1.95)) // 64 * 64
    total = dice.choice((4096, 8192))
    engine: dict[str, Any] = {
        "page_size": page,
        "attention_backend": "triton" if page == 1 else dice.choice(("trtllm_mha", "triton")),
        "max_total_tokens": total,
        "swa_full_tokens_ratio": swa / total,
        # Without it SGLang may make the SWA pool larger than it was asked to.
        "max_running_requests": dice.choice((None, 2, 8)),
        "chunked_prefill_size": chunk,
    }
    if dice.random() < 0.5:
        engine["disable_radix_cache"] = True
    if dice.random() < 0.3:
        engine["enable_mixed_chunk"] = True
    if not mtp and dice.random() < 0.3:
        engine["disable_overlap_schedule"] = True
    return Shape(mtp, engine)


def fixed(seed: int) -> bool:
    """True if the fixes that this release needs are in force on the server of a seed."""
    return seed % 2 == 0


def words(seed: int) -> str:
    return f"{'' if fixed(seed) else 'no fixes, '}{draw(seed).words}"


def one(seed: int, folder: Path) -> tuple[bool, str, float]:
    """Run the server of a seed: whether it is good, what happened, and the seconds it took."""
    environ = {"G4DEBUG_HANG_SECONDS": str(HANG), "G4DEBUG_STARVED_STEPS": "300"}
    if not fixed(seed):
        environ["G4DEBUG_FIXES"] = "none"
    ran = launch(MODULE, {"seed": seed}, environ, True, folder, TIMEOUT)
    return *judge(ran, folder), ran.seconds


def judge(ran: Outcome, folder: Path) -> tuple[bool, str]:
    records = [reading.read(path) for path in sorted((folder / "dumps").glob("*.pt"))]
    findings = [r.finding for r in records]
    told = [f for f in findings if says_it_stands(f)]
    other = [f for f in findings if f.check != RECORDS]
    if other:
        return False, f"A finding: {other[0].headline}"
    if not ran.completed:
        # SGLang has errors of its own in such pools; the flight recorder's dump tells of them. Only
        # of a server that never ends it tells enough that it stands.
        why = findings if ran.status is None else [f for f in findings if f not in told]
        return bool(why), f"{not_completed(ran)} {why[0].headline if why else 'Nothing told it.'}"
    asked, stood = ran.result["requests"], ran.result["stood"]
    said = f"{asked} requests, {ran.result['refused']} refused, {stood} stood"
    if stood and not told:
        return False, f"{said}: that was not told."
    if told and not stood:
        return False, f"{said}, but it was told: {told[0].headline}"
    return True, f"{said}{': ' + told[0].headline if told else ''}."


async def drive(client: Client, seed: int, swa: int) -> tuple[int, int]:
    """Long prompts, some at once. Returns how many stood, and how many SGLang refused.

    It ends as soon as some stand.
    """
    dice = random.Random(f"narrow traffic {seed}")
    refused = 0
    shared = client.prompt(swa)
    for _ in range(BURSTS):
        waiting = set()
        for _ in range(dice.randint(1, 4)):
            length = dice.randint(swa // 4, min(3 * swa, LONGEST))
            start = shared[: dice.randint(1, len(shared))] if dice.random() < 0.5 else [2]
            prompt = start + client.tokens(max(1, length - len(start)))
            waiting.add(client.start(prompt[:LONGEST], dice.choice((1, 8, 40))))
            await asyncio.sleep(dice.choice((0.0, 0.2, 1.0)))
        answered = time.monotonic()
        while waiting:
            done, waiting = await asyncio.wait(
                waiting, timeout=1.0, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                answered = time.monotonic()
                try:
                    task.result()
                except HTTPException:  # an empty server has no room for it
                    refused += 1
            if time.monotonic() - answered > STANDS:
                client.manager.abort_request(abort_all=True)
                await asyncio.wait(waiting, timeout=STANDS)
                return len(waiting), refused
    return 0, refused


def main(device: str, result: Path, seed: int) -> None:
    """The child: the server of a seed."""
    from g4debug.cpu.server import engine_arguments

    shape = draw(seed)
    swa = round(shape.engine["max_total_tokens"] * shape.engine["swa_full_tokens_ratio"])
    logs = {"log_level": "info", "decode_log_interval": 20}
    with running(engine_arguments(shape.mtp, **logs, **shape.engine)) as engine:
        client = Client(engine, f"narrow-{seed}", result.with_suffix(".log"))
        stood, refused = engine.loop.run_until_complete(drive(client, seed, swa))
        told = {"requests": client.requests, "stood": stood, "refused": refused}
        result.write_text(json.dumps(told))
