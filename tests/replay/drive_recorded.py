"""Driven by engine tests, in a process of its own: mixed traffic, of which a tape is made.

``drive_recorded.py ORDER_JSON``: seed, requests, together (how many at once), mtp, and more
arguments of the engine. Strangers, conversations, shared prefixes, aborts and stops. If ``tape`` is
in the order, it asks the scheduler for its tape at the end, and writes it there. ``flush``: the
cache is flushed, and so many requests follow. ``long``: so many long answers. ``waiting``: so
many requests wait for each other, of which 0.5.12.post1 dies. ``grammar``: so many
requests have one, before that flush. ``salted``: one prompt, so many times
with each of SALTS. ``priorities``: each request has one of these, or none for null. ``parked``: at
last, a prompt of so many tokens, with which 0.5.23 stands in a pool smaller than two chunks
(#36458). ``idle``: seconds without a request before that. ``locked``: a bug of 0.5.12.post1 shows
itself. So locked-prefix-0.5.12.post1.pt was made, with G4DEBUG_FIXES=none, seed
7, 25 requests, 3 together, no mtp, and in the engine max_total_tokens 6144, swa_full_tokens_ratio
0.3, max_running_requests 4, chunked_prefill_size 512, disable_overlap_schedule.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from typing import Any

WORDS = (4, 512)
SALTS: tuple[dict[str, str], ...] = (
    {}, {"extra_key": "x"}, {"cache_salt": "x"}, {"extra_key": "y"},
)  # fmt: skip
# The prefix cache keeps a prompt with one of these apart from that with another one.
SALTED = 200  # tokens of that prompt


class Traffic:
    def __init__(self, engine: Any, seed: int, priorities: list[int | None]) -> None:
        self.engine, self.dice, self.count = engine, random.Random(seed), 0
        self.priorities = priorities
        self.shared = [self.tokens(192), self.tokens(300)]

    def tokens(self, count: int) -> list[int]:
        return [self.dice.randrange(*WORDS) for _ in range(count)]

    async def ask(self, prompt: list[int], longest: int, **more: Any) -> list[int]:
        sampling = {"temperature": 0, "max_new_tokens": longest, "ignore_eos": True, **more}
        self.count += 1
        rid = f"q{self.count:05}"
        other = {"priority": self.dice.choice(self.priorities)} if self.priorities else {}
        told = await self.engine.async_generate(
            input_ids=prompt, sampling_params=sampling, rid=rid, **other
        )
        return list(told["output_ids"])

    async def one(self) -> None:
        dice = self.dice
        kind = dice.random()
        if kind < 0.35:
            await self.ask(self.tokens(dice.randint(20, 700)), dice.randint(2, 20))
        elif kind < 0.5:
            stops = dice.sample(range(*WORDS), 60)
            more: dict[str, Any] = {"stop_token_ids": stops, "ignore_eos": False}
            if self.count % 2:  # the same words as strings, which end a request in any case
                more = {"stop": [f"w{n} " for n in stops[:32]]}  # 0.5.23 takes no more
            await self.ask(self.tokens(dice.randint(20, 400)), 60, **more)
        elif kind < 0.65:
            asked = asyncio.ensure_future(self.ask(self.tokens(dice.randint(50, 700)), 60))
            await asyncio.sleep(dice.uniform(0.02, 0.6))
            self.engine.tokenizer_manager.abort_request(rid=f"q{self.count:05}")
            with contextlib.suppress(Exception):
                await asyncio.wait_for(asked, 30)
        elif kind < 0.8:
            prompt = self.tokens(dice.randint(30, 200))
            for _ in range(dice.randint(2, 3)):
                prompt += await self.ask(prompt, dice.randint(4, 30))
                prompt += self.tokens(dice.randint(10, 80))
        else:
            prompt = dice.choice(self.shared) + self.tokens(dice.randint(5, 300))
            await self.ask(prompt, dice.randint(2, 16))

    async def long(self) -> None:
        """A long answer: in small pools some are retracted."""
        longest = self.dice.randint(20, 220)
        await self.ask(self.tokens(self.dice.randint(40, 420)), longest)

    async def run(self, count: int, together: int, long: bool = False) -> None:
        gate = asyncio.Semaphore(together)

        async def gated() -> None:
            async with gate:
                await (self.long() if long else self.one())
                await asyncio.sleep(self.dice.uniform(0, 0.15))

        await asyncio.gather(*(gated() for _ in range(count)))

    async def waiting(self, count: int) -> None:
        """Case zero-accept of the history suite: a pool for one of them, so the next one waits."""
        dice = self.dice
        asked = [
            self.ask(self.tokens(dice.randint(270, 300)), dice.randint(8, 20)) for _ in range(count)
        ]
        await asyncio.gather(*asked)

    async def salted(self, times: int) -> None:
        """One prompt on and on. Engine.generate has no ``extra_key``, so SGLang's own request is
        made here."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        prompt = self.tokens(SALTED)
        for _ in range(times):
            for salt in SALTS:
                asked = GenerateReqInput(
                    input_ids=prompt,
                    sampling_params={"temperature": 0, "max_new_tokens": 3, "ignore_eos": True},
                    **salt,
                )
                async for _told in self.engine.tokenizer_manager.generate_request(asked, None):
                    pass

    async def locked(self) -> None:
        """Case locked-prefix of the history suite, among other traffic.

        A long answer behind a shared beginning, while strangers need its pages.
        """
        background = asyncio.ensure_future(self.run(12, 2))
        shared = self.tokens(256)
        await self.ask(shared + self.tokens(192), 4)
        answer = asyncio.ensure_future(self.ask(shared + self.tokens(192), 160))
        await asyncio.sleep(0.5)
        for _ in range(3):
            for _ in range(3):
                await self.ask(self.tokens(320), 3)
            await self.ask(shared + self.tokens(64), 3)
        await answer
        await background


def main() -> None:
    import sglang

    from g4debug.cpu.server import engine_arguments

    order = json.loads(sys.argv[1])
    engine = sglang.Engine(**engine_arguments(mtp=order["mtp"], **order.get("engine", {})))
    traffic = Traffic(engine, order["seed"], order.get("priorities", []))
    engine.loop.run_until_complete(traffic.run(order["requests"], order["together"]))
    if order.get("long"):
        engine.loop.run_until_complete(traffic.run(order["long"], order["together"], long=True))
    if order.get("waiting"):
        engine.loop.run_until_complete(traffic.waiting(order["waiting"]))
    if order.get("salted"):
        engine.loop.run_until_complete(traffic.salted(order["salted"]))
    if order.get("locked"):
        engine.loop.run_until_complete(traffic.locked())
    for _ in range(order.get("grammar", 0)):
        asked = traffic.ask(traffic.tokens(90), 4, regex="[a-z]+")
        with contextlib.suppress(Exception):  # the toy may have no word for it
            engine.loop.run_until_complete(asked)
    if order.get("flush"):
        time.sleep(1)  # a flush that comes a moment too early waits, and a tape cannot carry that
        assert engine.flush_cache().success
        engine.loop.run_until_complete(traffic.run(order["flush"], order["together"]))
    if order.get("parked"):
        time.sleep(order.get("idle", 0))
        asked = asyncio.wait_for(traffic.ask(traffic.tokens(order["parked"]), 4), 30)
        with contextlib.suppress(TimeoutError):
            engine.loop.run_until_complete(asked)
    if order.get("tape"):
        import os

        command = [sys.executable, "-m", "g4debug", "doctor", "--pid", str(os.getpid())]
        done = subprocess.run([*command, "--tape", order["tape"]], capture_output=True, text=True)
        print("RESULT", json.dumps([done.returncode, done.stdout, done.stderr]), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
