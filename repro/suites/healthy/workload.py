"""The declaration of a workload and of its engine, and the client that drives the engine."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness.engine import greedy

from g4debug.cpu.server import DEFAULT
from g4debug.hooking import targets

Output = dict[str, Any]  # what SGLang's generate returns for one request
WORDS = (4, 512)  # the token ids of the toy model that are words


class NotExercised(Exception):
    """A workload did not do the actions in its row of the table, so it would prove nothing."""


@dataclass(frozen=True)
class Workload:
    """One row of the table.

    what: the feature, in a few words. how: its actions and their effect, in one sentence.
    drive: does it. It raises NotExercised where the feature did not come into play.
    compare: the outputs must be the same as on a server without tracers. False where they depend on
    time, for example on the moment at which an abort arrives.
    """

    what: str
    how: str
    drive: Callable[[Client], Awaitable[None]]
    compare: bool = True

    @property
    def id(self) -> str:
        return self.drive.__name__


def workload(
    what: str, how: str, compare: bool = True
) -> Callable[[Callable[[Client], Awaitable[None]]], Workload]:
    """A decorator that makes a Workload of the function that drives it."""
    return lambda drive: Workload(what, how, drive, compare)


@dataclass(frozen=True)
class Group:
    """Workloads that share an engine.

    title: how the engine differs from others. engine: arguments of ``sgl.Engine``, beside the CPU
    engine's own. environ: environment variables of its processes. mtp: with FROZEN_KV_MTP.
    idle: tracers that have nothing to check on this engine, with the reason.
    model: the toy that is served. only: why no other model than Gemma-4 has it, '' if others do.
    prepare: writes files for the engine and a model into a folder, and returns more engine
    arguments.
    refused: SGLang's own message, because it cannot run this engine here. Then no workload
    runs, and the group passes if the log has this text.
    short: runs only where it is asked for by its name, as in a test.
    strict: SGLang's own check of its pools runs in every step. False, with a reason in ``why``,
    where that check is wrong.
    """

    id: str
    title: str
    workloads: tuple[Workload, ...]
    engine: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    mtp: bool = True
    idle: Mapping[str, str] = field(default_factory=dict)
    model: str = DEFAULT
    only: str = ""
    prepare: Callable[[Path, str], Mapping[str, Any]] | None = None
    refused: str = ""
    short: bool = False
    strict: bool = True
    why: str = ""

    @property
    def ranks(self) -> int:
        """How many schedulers its engine has."""
        return int(self.engine.get("tp_size", 1)) * int(self.engine.get("pp_size", 1))


CHUNKS = {"chunked_prefill_size": 256}
# The limits that a server has by itself: for what lasts longer than the suite's own.
DEFAULT_LIMITS = {"G4DEBUG_HANG_SECONDS": "20", "G4DEBUG_STARVED_STEPS": "5000"}
Given = Mapping[str, Any]  # arguments of ``sgl.Engine``
NONE: Given = MappingProxyType({})


def with_mtp(
    id: str, title: str, workloads: tuple[Workload, ...], engine: Given = NONE, **more: Any
) -> Group:
    """A group with FROZEN_KV_MTP. more: of ``Group``."""
    blind = dict(more.pop("idle", {}))
    if engine.get("disable_radix_cache"):
        blind["prefix-cache"] = "this server keeps no prefix cache"
    return Group(id, title, workloads, {**CHUNKS, **engine}, idle=blind, **more)


def without_mtp(
    id: str, title: str, workloads: tuple[Workload, ...], engine: Given = NONE, **more: Any
) -> Group:
    """A group with neither FROZEN_KV_MTP nor overlap scheduling. more: of ``Group``."""
    arguments = {"disable_overlap_schedule": True, **engine}
    blind = dict(more.pop("idle", {}))
    if targets.absent("result.resolve"):
        blind["spec-lifecycle"] = "without FROZEN_KV_MTP there is no spec_info"
    elif arguments.get("enable_mixed_chunk"):
        blind["spec-lifecycle"] = "with mixed chunks it follows no sampled tokens"
    return with_mtp(id, title, workloads, arguments, mtp=False, idle=blind, **more)


class Client:
    """Drives one workload on an engine.

    outputs: request -> its token ids, for the comparison. requests: how many were sent.
    facts: what really happened, for the table. log: the log of the engine's processes. patience:
    how many times as long as on a CPU it waits for a line of the log.
    """

    def __init__(self, engine: Any, name: str, log: Path, patience: float = 1.0) -> None:
        self.engine = engine
        self.outputs: dict[str, Any] = {}
        self.requests = 0
        self.facts: dict[str, int] = {}
        self._name = name
        self._log = log
        self._patience = patience
        self._begin = log.stat().st_size if log.is_file() else 0
        self._random = random.Random(name)

    @property
    def manager(self) -> Any:
        """SGLang's TokenizerManager, which the HTTP endpoints call."""
        return self.engine.tokenizer_manager

    def tokens(self, count: int) -> list[int]:
        """Random words. The same in every run of this workload."""
        return [self._random.randrange(*WORDS) for _ in range(count)]

    def prompt(self, count: int) -> list[int]:
        return [2, *self.tokens(count - 1)]

    def between(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    async def generate(
        self,
        prompt: list[int] | str,
        tokens: int = 24,
        *,
        sampling: Mapping[str, Any] | None = None,
        name: str = "",
        **request: Any,
    ) -> Any:
        """One request, at temperature 0 and without an end of its own unless ``sampling`` says so.

        Returns SGLang's output, or a list of them for n > 1.
        """
        self.requests += 1
        name = name or f"{self._name}-{self.requests}"
        asked = {**greedy(tokens), **(sampling or {})}
        given = {"prompt": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
        found = await self.engine.async_generate(
            **given, sampling_params=asked, rid=None if asked.get("n", 1) > 1 else name, **request
        )
        several = found if isinstance(found, list) else [found]
        self.outputs[name] = [o.get("output_ids") for o in several]
        return found

    def start(self, *given: Any, **request: Any) -> asyncio.Future[Any]:
        """``generate``, which begins now and is awaited later."""
        return asyncio.ensure_future(self.generate(*given, **request))

    async def stream(self, prompt: list[int], tokens: int, name: str = "", **request: Any) -> Any:
        """The pieces of a streamed request, as an asynchronous iterator."""
        self.requests += 1
        return await self.engine.async_generate(
            input_ids=prompt,
            sampling_params=greedy(tokens),
            rid=name or f"{self._name}-{self.requests}",
            stream=True,
            **request,
        )

    async def together(self, *requests: Awaitable[Any]) -> list[Any]:
        """Requests that run at the same time."""
        return list(await asyncio.gather(*requests))

    async def batch(
        self,
        count: int,
        prompt: tuple[int, int] = (2, 300),
        tokens: int | tuple[int, int] = (2, 40),
        **request: Any,
    ) -> list[Output]:
        """``count`` requests at the same time. prompt, tokens: their least and greatest lengths."""

        def drawn() -> int:
            return tokens if isinstance(tokens, int) else self.between(*tokens)

        return await self.together(
            *(
                self.generate(self.prompt(self.between(*prompt)), drawn(), **request)
                for _ in range(count)
            )
        )

    async def until(self, text: str, count: int = 1, patience: float = 60.0) -> None:
        """Wait until ``text``, a regular expression, was logged so often in this workload."""
        end = time.monotonic() + patience * self._patience
        while len(re.findall(text, self.log())) < count:
            require(time.monotonic() < end, f"the log has no {count} lines with {text!r}")
            await asyncio.sleep(0.05)

    async def decoding(self, requests: int, steps: int = 2) -> None:
        """Wait until a batch of so many requests has decoded so many steps from now on."""
        line = rf"Decode batch, #running-req: {requests},"
        await self.until(line, len(re.findall(line, self.log())) + steps)

    def note(self, what: str, count: int, least: int = 1) -> None:
        """``count`` of ``what`` happened. Raises NotExercised if it was less often than needed."""
        self.facts[what] = self.facts.get(what, 0) + count
        if self.facts[what] < least:
            raise NotExercised(f"{what}: {self.facts[what]}, expected at least {least}")

    def log(self) -> str:
        """The log of the engine's processes since this workload began."""
        return self._log.read_bytes()[self._begin :].decode(errors="replace")


def require(holds: bool, text: str) -> None:
    """Raises NotExercised with ``text`` unless ``holds``."""
    if not holds:
        raise NotExercised(text)


def finish(output: Output) -> str:
    """Why a request ended: ``stop``, ``length`` or ``abort``."""
    return str((output["meta_info"]["finish_reason"] or {}).get("type", ""))


def cached(output: Output) -> int:
    """Tokens of the prompt that came from the prefix cache or from the session."""
    return int(output["meta_info"].get("cached_tokens", 0))
