"""A child: one server that may stand, until it stands or has served its traffic.

The result has how many requests were sent, how many stood, what SGLang refused, and how many
seconds after SGLang's last batch the flight recorder spoke.
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

from suites.fuzz.batch_lines import BatchLines
from suites.fuzz.draw import Shape
from suites.fuzz.narrow_draw import FIRST, LONGEST, PAGE, draw, room, short
from suites.healthy.workload import Client

BURSTS = 3
BURSTS_BEFORE = 4  # of a seed below FIRST
# Seconds without an answer to anybody, and without a batch in SGLang's log, after which a server
# stands. A step on a busy machine takes a second or two.
STANDS = 12.0
LOOK = 0.2  # seconds between two looks at the log
ABORT = 5.0  # seconds that the requests have to end once they are aborted


async def drive(traffic: Traffic, lines: BatchLines) -> tuple[int, list[str]]:
    """Returns how many stood, and what SGLang said to those that it refused.

    It ends as soon as some stand.
    """
    refused: list[str] = []
    for _ in range(BURSTS if traffic.seed >= FIRST else BURSTS_BEFORE):
        waiting = await traffic.burst()
        answered = time.monotonic()
        while waiting:
            done, waiting = await asyncio.wait(
                waiting, timeout=LOOK, return_when=asyncio.FIRST_COMPLETED
            )
            lines.look()
            for task in done:
                answered = time.monotonic()
                try:
                    task.result()
                except HTTPException as e:  # an empty server has no room for it
                    refused.append(str(e.detail))
            if time.monotonic() - max(answered, lines.began) > STANDS:
                return await _stood(traffic.client, waiting), refused
    return 0, refused


class Traffic:
    """Long prompts, some at once: the same requests for a seed, whatever runs beside it."""

    def __init__(self, client: Client, seed: int, shape: Shape) -> None:
        self.client, self.seed, self.shape = client, seed, shape
        self.dice = random.Random(f"narrow traffic {seed}")
        self.room = room(shape)
        self.shared = client.prompt(self.room)
        self.sent: dict[str, list[int]] = {}  # by the request's name: its prompt

    async def burst(self) -> set[asyncio.Future[Any]]:
        started, answers = set(), self.client.outputs
        turns = [[*self.sent[n], *answers[n][0]] for n in self.sent if n in answers]
        for _ in range(self.dice.randint(1, 4)):
            prompt = self._prompt(turns)
            name = f"narrow-{self.seed}-{len(self.sent) + 1}"
            self.sent[name] = prompt
            started.add(self.client.start(prompt, self._tokens(prompt), name=name))
            await asyncio.sleep(self.dice.choice((0.0, 0.2, 1.0)))
        return started

    def _prompt(self, turns: list[list[int]]) -> list[int]:
        """turns: conversations that are served so far, of which one may go on."""
        dice, most = self.dice, LONGEST
        longest = min(3 * self.room, LONGEST)
        if short(self.shape):
            most = longest = self.room - 2 * PAGE
        length = dice.randint(self.room // 4, longest)
        if self.seed >= FIRST and turns and dice.random() < 0.4:
            start = dice.choice(turns)
        else:
            start = self.shared[: dice.randint(1, self.room)] if dice.random() < 0.5 else [2]
        return (start + self.client.tokens(max(1, length - len(start))))[:most]

    def _tokens(self, prompt: list[int]) -> int:
        """Of the answer. Where the pool is short: all that it has room for, too."""
        most = (self.room - len(prompt),) if short(self.shape) else ()
        return int(self.dice.choice((1, 8, 40, *most)))


async def _stood(client: Client, waiting: set[asyncio.Future[Any]]) -> int:
    """How many stand. They are aborted, so that the tracers see what becomes of them."""
    client.manager.abort_request(abort_all=True)
    await asyncio.wait(waiting, timeout=ABORT)
    for task in waiting:
        task.cancel()
    return len(waiting)


def main(device: str, result: Path, seed: int) -> None:
    from g4debug.cpu.server import engine_arguments

    shape, log = draw(seed), result.with_suffix(".log")
    logs = {"log_level": "info", "decode_log_interval": 1, "skip_tokenizer_init": True}
    begin = time.monotonic()
    with running(engine_arguments(shape.mtp, model=shape.model, **logs, **shape.engine)) as engine:
        up = time.monotonic()
        client, lines = Client(engine, f"narrow-{seed}", log), BatchLines(log)
        traffic = Traffic(client, seed, shape)
        stood, refused = engine.loop.run_until_complete(drive(traffic, lines))
        told = {
            "requests": client.requests,
            "stood": stood,
            "refused": refused,
            "told": lines.told,
            "seconds": [up - begin, time.monotonic() - up],
        }
        result.write_text(json.dumps(told))
