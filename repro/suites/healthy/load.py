"""A real ``sglang.launch_server`` under concurrent HTTP load, armed, for some minutes.

Clients send as in production: prompts of all lengths, shared prefixes, streams that they read to
the end or leave in the middle, several answers, logprobs, turns of a session, health checks. An
operator pauses the server now and then, and flushes its cache.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from harness.engine import greedy

CLIENTS = 12
FLAGS = (
    "--max-total-tokens=4096",
    "--max-running-requests=8",
    "--chunked-prefill-size=256",
    "--log-level=info",
    "--decode-log-interval=1",
)
LOGPROBS = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
PATIENCE = 180.0  # seconds that a client waits for an answer


class Load:
    """The clients of one server. sent, ended: how many requests, by their kind."""

    def __init__(self, url: str, seconds: float, seed: int = 0) -> None:
        self.url = url
        self.end = time.monotonic() + seconds
        self.sent: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._prefixes = [self._tokens(250) for _ in range(4)]

    async def run(self) -> None:
        """Returns when the time is over and every client has its last answer."""
        timeout = aiohttp.ClientTimeout(total=PATIENCE)
        # SGLang closes a connection that was idle for 5 s. One that is used in that moment fails.
        connector = aiohttp.TCPConnector(keepalive_timeout=2)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            self.http = session
            clients = [self._client() for _ in range(CLIENTS)]
            await asyncio.gather(*clients, self._operator(), self._probe())

    # --- who is there ------------------------------------------------------------------------

    async def _client(self) -> None:
        draw = self._random
        ways: tuple[tuple[Callable[[], Awaitable[Any]], int], ...] = (
            (lambda: self._generate("plain", self._asked()), 8),
            (lambda: self._stream("streamed", self._asked(), pieces=1 << 30), 5),
            # The client goes away in the middle, so SGLang aborts the request.
            (
                lambda: self._stream("left by the client", self._asked(150), draw.randint(1, 8)),
                3,
            ),
            (self._aborted, 2),
            (lambda: self._generate("three answers", self._asked(20, n=3, temperature=0.8)), 1),
            (lambda: self._generate("logprobs", {**self._asked(30), **LOGPROBS}), 2),
            (self._completion, 2),
            (self._session, 1),
        )
        calls, weights = zip(*ways, strict=True)
        while time.monotonic() < self.end:
            (way,) = draw.choices(calls, weights)
            await way()
            if draw.random() < 0.1:  # the server gets idle now and then
                await asyncio.sleep(draw.uniform(0, 2))

    async def _operator(self) -> None:
        """Pauses, flushes and asks for the state of the server."""
        while time.monotonic() < self.end:
            await asyncio.sleep(self._random.uniform(5, 15))
            mode = self._random.choice(("in_place", "retract", "flush", "look"))
            self.sent[f"operator: {mode}"] += 1
            if mode == "flush":
                await self._post("/flush_cache", {}, refused=True)  # a busy server refuses
            elif mode == "look":
                await self._get("/server_info")
            else:
                await self._post("/pause_generation", {"mode": mode})
                await asyncio.sleep(self._random.uniform(0, 1))
                await self._post("/continue_generation", {"torch_empty_cache": False})

    async def _probe(self) -> None:
        while time.monotonic() < self.end:
            self.sent["health check"] += 1
            await self._get("/health_generate")
            await asyncio.sleep(3)

    # --- what clients do ---------------------------------------------------------------------

    async def _aborted(self) -> None:
        rid = f"load-{self._random.randrange(1 << 60):x}"
        running = asyncio.ensure_future(self._generate("aborted", {**self._asked(200), "rid": rid}))
        await asyncio.sleep(self._random.uniform(0, 2))
        await self._post("/abort_request", {"rid": rid})
        await running

    async def _completion(self) -> None:
        self.sent["/v1/completions"] += 1
        words = " ".join(f"w{t}" for t in self._tokens(self._random.randint(1, 200)))
        asked = {"model": "g4debug-tiny", "prompt": words, "max_tokens": 30, "temperature": 0}
        found = await self._post("/v1/completions", asked)
        self.ended[str(found["choices"][0]["finish_reason"])] += 1

    async def _session(self) -> None:
        session = await self._post("/open_session", {"capacity_of_str_len": 10_000})
        rid = None
        for _ in range(3):
            asked = {
                "input_ids": self._tokens(self._random.randint(10, 100)),
                "sampling_params": greedy(20),
                "session_params": {"id": session, "rid": rid},
            }
            found = await self._generate("turn of a session", asked)
            rid = found["meta_info"]["id"]
        await self._post("/close_session", {"session_id": session})

    # --- how -----------------------------------------------------------------------------------

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(4, 512) for _ in range(count)]

    def _asked(self, most: int = 60, **more: Any) -> dict[str, Any]:
        """A request of at most so many tokens. more: of its sampling parameters."""
        draw = self._random
        prompt = [2, *self._tokens(draw.choice((10, 60, 120, 400, 900)))]
        if draw.random() < 0.5:
            prefix = draw.choice(self._prefixes)
            prompt = [2, *prefix[: draw.randint(20, 250)], *self._tokens(draw.randint(1, 60))]
        tokens = draw.randint(1, most)
        return {"input_ids": prompt, "sampling_params": {**greedy(tokens), **more}}

    async def _generate(self, what: str, asked: dict[str, Any]) -> Any:
        self.sent[what] += 1
        found = await self._post("/generate", asked)
        for one in found if isinstance(found, list) else [found]:
            self.ended[str((one["meta_info"]["finish_reason"] or {}).get("type"))] += 1
        return found

    async def _stream(self, what: str, asked: dict[str, Any], pieces: int) -> None:
        self.sent[what] += 1
        asked["stream"] = True
        async with self.http.post(f"{self.url}/generate", json=asked) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                pieces -= line.startswith(b"data: {")
                if pieces <= 0:
                    self.ended["left"] += 1
                    return
        self.ended["streamed"] += 1

    async def _post(self, path: str, asked: dict[str, Any], refused: bool = False) -> Any:
        async with self.http.post(f"{self.url}{path}", json=asked) as answer:
            if not refused:
                answer.raise_for_status()
            text = await answer.text()
        try:
            return json.loads(text)
        except ValueError:
            return text

    async def _get(self, path: str) -> str:
        async with self.http.get(f"{self.url}{path}") as answer:
            answer.raise_for_status()
            return await answer.text()
