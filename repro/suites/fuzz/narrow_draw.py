"""Draws a server that may stand, because its pools are small, and its traffic.

SGLang 0.5.23 lets a prompt stand (#36458) if the SWA pool is smaller than two chunks, the prompt is
longer than the pool, no prefix cache is there to evict, and overlap scheduling keeps what lies
behind the window for two chunks. Where it knows how many requests may run, as with a draft, it
makes such a pool larger by itself. So most servers have no prefix cache, no draft and no such
limit; each of the three, and overlap scheduling, is drawn otherwise now and then.

With a prefix cache a conversation may stand: its next turn lacks the SWA pages that its own prefix
has locked. Without fixes, some servers have a single pool, no prefix cache, and less room than the
context: an answer of the greatest length that ignores its end is never admitted there. The fix for
that, ignore-eos-admission, came later than the first page, whose seeds draw what they drew: no
server with the fixes is drawn so.
"""

from __future__ import annotations

import random
from typing import Any

from suites.fuzz.draw import Shape

FIRST = 1001  # a seed below draws what it always drew: few of those servers stand
LONGEST = 1900  # tokens of a prompt; the toy model takes 2,048 with the answer
PAGE = 64
SINGLE = "llama"  # the model with one pool


def draw(seed: int) -> Shape:
    """The server of a seed."""
    if seed < FIRST:
        return _seldom(seed)
    dice = random.Random(f"narrow {seed}")
    if not fixed(seed) and dice.random() < 0.15:
        return _short_pool(dice)
    chunk = dice.choice((192, 256, 320, 384, 512, 640))
    # More than a chunk and the page that SGLang asks for beside it, and less than two chunks.
    swa = dice.randrange(chunk + 2 * PAGE, 2 * chunk, PAGE)
    mtp = dice.random() < 0.2
    radix = dice.random() < (0.6 if mtp else 0.2)
    engine = _engine(dice, dice.choice((1, 16, 64, 64)), chunk)
    engine |= _pools(swa, dice.choice((4096, 8192)))
    engine["max_running_requests"] = dice.choice((2, 8)) if dice.random() < 0.15 else None
    if not radix:
        engine["disable_radix_cache"] = True
    if dice.random() < 0.3:
        engine["enable_mixed_chunk"] = True
    if not mtp and dice.random() < 0.1:
        engine["disable_overlap_schedule"] = True
    return Shape(mtp, engine)


def _short_pool(dice: random.Random) -> Shape:
    """A single pool that is smaller than the context."""
    engine = _engine(dice, dice.choice((1, 64, 64)), dice.choice((256, 512)))
    engine["max_total_tokens"] = dice.choice((768, 1024, 1536))
    engine["max_running_requests"] = dice.choice((None, 2, 8))
    engine["disable_radix_cache"] = True
    return Shape(False, engine, SINGLE)


def _engine(dice: random.Random, page: int, chunk: int) -> dict[str, Any]:
    return {
        "page_size": page, "attention_backend": _backend(dice, page), "chunked_prefill_size": chunk
    }  # fmt: skip


def _backend(dice: random.Random, page: int) -> str:
    return "triton" if page == 1 else dice.choice(("trtllm_mha", "triton"))


def _pools(swa: int, total: int) -> dict[str, Any]:
    return {"max_total_tokens": total, "swa_full_tokens_ratio": swa / total}


def _seldom(seed: int) -> Shape:
    """The server of a seed below ``FIRST``."""
    dice = random.Random(f"narrow {seed}")
    mtp, page = dice.random() < 0.5, dice.choice((1, 64, 64))
    chunk = dice.choice((256, 384, 512))
    swa = int(chunk * dice.uniform(1.1, 1.95)) // 64 * 64
    total = dice.choice((4096, 8192))
    engine = {
        "page_size": page,
        "attention_backend": _backend(dice, page),
        **_pools(swa, total),
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


def room(shape: Shape) -> int:
    """Tokens of its smallest pool, unless SGLang makes it larger."""
    engine = shape.engine
    return int(engine["max_total_tokens"] * engine.get("swa_full_tokens_ratio", 1.0) + 0.5)


def short(shape: Shape) -> bool:
    """True if its single pool is smaller than the context."""
    return shape.model == SINGLE


def fixed(seed: int) -> bool:
    """True if the fixes that this release needs are in force on the server of a seed."""
    return seed % 2 == 0


def words(seed: int) -> str:
    return f"{'' if fixed(seed) else 'no fixes, '}{draw(seed).words}"
