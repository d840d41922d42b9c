"""Answers that must match a grammar. The toy model gets a tokenizer that has bytes for it."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.byte_tokenizer import beside

from suites.healthy.workload import (
    DEFAULT_LIMITS,
    Client,
    finish,
    require,
    with_mtp,
    without_mtp,
    workload,
)

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "enum": ["page", "table", "pool"]},
        "free": {"type": "boolean"},
        "pages": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 3, "maxItems": 5},
    },
    "required": ["name", "free", "pages"],
    "additionalProperties": False,
}
REGEX = r"(SWA|FULL) page [1-9][0-9]{2,4}, freed in step [0-9]{3}"


def byte_tokenizer(folder: Path, model: str) -> Mapping[str, Any]:
    """Write a model: its toy with a token for each byte, in a vocabulary of the same size."""
    from g4debug.cpu import toys

    # The two engines of a group begin at the same time, so each has a folder of its own.
    return {"model_path": str(beside(toys.load(model).models()[0], folder))}


async def _matched(client: Client, name: str, value: str, count: int = 4) -> list[str]:
    """``count`` requests with this grammar and as many without, all at the same time."""
    wanted = {name: value, "ignore_eos": False}
    found, _ = await client.together(
        client.batch(count, (20, 200), 300, sampling=wanted), client.batch(count, (20, 200), 40)
    )
    texts = [o["text"] for o in found]
    ended = [finish(o) for o in found]
    require(ended == ["stop"] * count, f"grammars ended by {ended}: {texts}")
    return texts


@workload("JSON schema", "four answers by a schema, beside four without")
async def json_schema(client: Client) -> None:
    for text in await _matched(client, "json_schema", json.dumps(SCHEMA)):
        answer = json.loads(text)
        require(set(answer) == {"name", "free", "pages"}, f"the answer is {text}")
        client.note("answers that match the schema", 1)


@workload("regular expression", "four answers by an expression, beside four")
async def regular_expression(client: Client) -> None:
    for text in await _matched(client, "regex", REGEX):
        require(re.fullmatch(REGEX, text) is not None, f"the answer is {text}")
        client.note("answers that match the expression", 1)


@workload("text prompts", "through a tokenizer of bytes")
async def free_text(client: Client) -> None:
    found = await client.together(
        *(
            client.generate(text * 8, 30, sampling={"stop": ["\x00\x00"]})
            for text in ("Which page is it? ", "Tell me who freed it. ", "Seite für Seite. ")
        )
    )
    client.note("text prompts", len(found))


SLOW = 30  # seconds


async def _slow(client: Client, expression: str) -> None:
    """A request that waits for its grammar for ``SLOW`` seconds, and is answered."""
    began = time.monotonic()
    asked = {"regex": expression, "ignore_eos": False}
    found = await client.generate(client.prompt(80), 300, sampling=asked, name=expression)
    waited = time.monotonic() - began
    require(waited >= SLOW, f"the grammar was there after {waited:.0f} s")
    require(re.fullmatch(expression, found["text"]) is not None, f"the answer is {found['text']}")
    client.note("seconds in which a grammar was compiled", SLOW)


@workload("a grammar that takes long", f"{SLOW} s, while nobody else is there; a hang is 20 s")
async def slow_alone(client: Client) -> None:
    await _slow(client, r"SWA page [1-9][0-9]{2}")


@workload(
    "a grammar that takes long, beside others", f"{SLOW} s, while others are served", compare=False
)
async def slow_beside_others(client: Client) -> None:
    slow = asyncio.ensure_future(_slow(client, r"FULL page [1-9][0-9]{2}"))
    while not slow.done():
        client.note("others that were served meanwhile", len(await client.batch(4)))
    await slow


WORKLOADS = (json_schema, regular_expression, free_text)
GRAMMAR = {"grammar_backend": "xgrammar"}

GROUPS = (
    with_mtp("grammar", "grammars, MTP", WORKLOADS, GRAMMAR, prepare=byte_tokenizer),
    without_mtp("grammar-plain", "grammars, no MTP", WORKLOADS, GRAMMAR, prepare=byte_tokenizer),
    without_mtp(
        "grammar-slow",
        "grammars that are compiled for longer than a hang (the fault `slow-grammar`), no MTP",
        (slow_alone, slow_beside_others),
        GRAMMAR,
        environ={**DEFAULT_LIMITS, "G4DEBUG_FAULTS": f"slow-grammar=on({1000 * SLOW})"},
        prepare=byte_tokenizer,
        only="no model takes part in the compiling of a grammar",
    ),
)
