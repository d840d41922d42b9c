"""A benchmark's requests: prompts with shared beginnings, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The lengths, in tokens, as (shortest, longest).

    prefixes: how many beginnings are shared; the first is the most frequent. prefix: a shared
    beginning. suffix: the rest of the prompt, which no other request has; short ones are more
    frequent than long ones. output: the answer.
    """

    vocab: int
    prefixes: int
    prefix: tuple[int, int]
    suffix: tuple[int, int]
    output: tuple[int, int]


@dataclass(frozen=True)
class Request:
    """prompt: token ids. tokens: how many tokens to make."""

    prompt: list[int]
    tokens: int


SHAPES = {
    "cuda": Shape(262_144, 12, (512, 1536), (32, 1024), (32, 160)),
    "cpu": Shape(512, 3, (64, 192), (8, 100), (4, 12)),
}


def requests(shape: Shape, seed: int, count: int, tokens: int = 0) -> list[Request]:
    """``count`` requests of a shape. tokens: how many each makes, in place of the shape's."""
    shared = random.Random(0)
    beginnings = [
        [2, *_tokens(shared, shape, shared.randint(*shape.prefix) - 1)]
        for _ in range(shape.prefixes)
    ]
    weights = [1 / (rank + 1) for rank in range(shape.prefixes)]
    rng = random.Random(seed)
    low, high = shape.suffix
    found = []
    for _ in range(count):
        length = round(low * (high / low) ** rng.random())
        beginning = rng.choices(beginnings, weights)[0]
        prompt = [*beginning, *_tokens(rng, shape, length)]
        found.append(Request(prompt, tokens or rng.randint(*shape.output)))
    return found


def alone(shape: Shape, seed: int, count: int, prompt: int, tokens: int) -> list[Request]:
    """``count`` requests with prompts of ``prompt`` tokens that share only their first one."""
    rng = random.Random(seed)
    return [Request([2, *_tokens(rng, shape, prompt - 1)], tokens) for _ in range(count)]


def _tokens(rng: random.Random, shape: Shape, count: int) -> list[int]:
    return rng.choices(range(4, shape.vocab), k=count)


def trunks(vocab: int, seed: int, count: int, pages: int, page_size: int) -> list[list[int]]:
    """``count`` long prompts of ``pages`` pages each, which have only their first token in common.

    One token follows the last page, so that all pages of the prompt are computed and cached.
    """
    rng = random.Random(seed)
    ids = range(4, vocab)
    return [[2, *rng.choices(ids, k=pages * page_size)] for _ in range(count)]


def twigs(trunk: list[int], vocab: int, seed: int, page_size: int) -> list[list[int]]:
    """Prompts that leave ``trunk`` after one, two, three ... pages, with one page of their own.

    Each splits a node of the prefix cache and adds one, so that n of them make 2 n nodes.
    """
    rng = random.Random(seed)
    ids = range(4, vocab)
    pages = (len(trunk) - 1) // page_size
    return [trunk[: n * page_size] + rng.choices(ids, k=page_size + 1) for n in range(1, pages)]
