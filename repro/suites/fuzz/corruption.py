"""Draws one corruption of a healthy server: what, where, when and to which value.

The same seed is the same corruption. A seed below FORMS gives one number another value. One from
FORMS on may also swap two numbers, or rotate the pages of a row. One from WIDER on strikes the
lengths, rows and tokens that the host keeps as Python numbers. A seed cannot know which requests
will run and which pages they will have. These are drawn as a share, from 0 to 1, and chosen when it
strikes.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

# A place that can be corrupted -> its name for people, and the moments at which it can be done. At
# a moment SGLang's own function is about to begin, or has just returned, inside all of our hooks.
PLAN, STEP, FORWARD, METADATA = "plan", "step", "forward", "metadata"
VERIFY, VERIFIED, RESULT, ALLOCATE, MATCH = "verify", "verified", "result", "allocate", "match"
WHAT: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "mapping": ("a slot of full_to_swa_index_mapping", (PLAN, STEP)),
        "row": ("a cell of req_to_token", (PLAN, STEP)),
        "table": ("a cell of what attention is handed", (METADATA,)),
        "out_cache_loc": ("where a token is written", (STEP, FORWARD)),
        "seq_lens": ("the length of a request in a batch", (STEP, FORWARD)),
        "req_pool_indices": ("the row of a request in a batch", (STEP, FORWARD)),
        "node": ("a token that the prefix cache holds", (PLAN, MATCH)),
        "free_list": ("a page of a free list", (PLAN, STEP)),
        "protected": ("cache_protected_len of a request", (PLAN, STEP)),
        "alloc": ("what an allocator returns", (ALLOCATE,)),
        "draft_tokens": ("a token that a verify is to judge", (VERIFY,)),
        "positions": ("the position of a token", (FORWARD, VERIFY)),
        "accept_lens": ("how many tokens a verify accepts", (VERIFIED,)),
        "next_tokens": ("a token behind the sampling", (RESULT,)),
        "future": ("what a step leaves for the next one", (STEP,)),
        "kv": ("the KV of a slot", (STEP,)),
    }
)
# What the host keeps, in the same form. A seed from WIDER on strikes one of these.
BOOKS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "lengths": ("a length of its KV that a request keeps", (PLAN, STEP, RESULT)),
        "host_row": ("the row that a request believes to have", (PLAN, STEP)),
        "free_rows": ("a row that is free", (PLAN, STEP)),
        "released": ("a page that was freed and is not in the free list yet", (PLAN, STEP)),
        "output": ("a token of an answer, in the request", (PLAN, STEP)),
        "prompt": ("a token of a prompt, in the request", (PLAN, STEP)),
        "input_ids": ("a token that a forward is handed", (FORWARD,)),
        "extend_lens": ("a length of a prefill, on the device", (FORWARD,)),
        "host_lens": ("a length of a batch, on the host", (STEP, FORWARD)),
    }
)
EVERYWHERE: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType({**WHAT, **BOOKS})
TO: Mapping[str, str] = MappingProxyType(
    {
        "zero": "0",
        "minus_one": "-1",
        "outside": "out of range",
        "other": "another live request's",
        "own": "another one of its own",
        "freed": "one that is free",
        "next": "one more",
    }
)
FORMS = 10_001  # the first seed that may swap or rotate
WIDER = 20_001  # the first seed that strikes what the host keeps
VALUE, SWAP, ROTATE = "value", "swap", "rotate"
# The pages that can be rotated, for people. What has an element for each request has no pages.
PAGES: Mapping[str, str] = MappingProxyType(
    {
        "mapping": "the pages of a request in full_to_swa_index_mapping",
        "row": "the pages of a row of req_to_token",
        "table": "the pages of a row of what attention is handed",
        "node": "the pages of a prefix that the cache holds",
    }
)
# What can have each form. A single number has no other to be swapped with, and the order of a free
# list means nothing.
FORM: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        VALUE: tuple(WHAT),
        SWAP: tuple(what for what in WHAT if what not in ("free_list", "protected")),
        ROTATE: tuple(PAGES),
    }
)
BOOKS_FORM: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        VALUE: tuple(BOOKS),
        SWAP: ("output", "prompt", "input_ids", "extend_lens", "host_lens"),
    }
)
# The values that a structure cannot get, because it has no such value.
NO: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"req_pool_indices": ("own",), "host_row": ("own",), "free_rows": ("freed",)}
)
SPECULATIVE = ("draft_tokens", "accept_lens")
PREFILL_ONLY = ("extend_lens",)
FUTURE = ("output_tokens_buf", "new_seq_lens_buf", "token_ids_map", "token_ids_buf")
STEPS = 40  # about as many as the traffic takes
PREFILLS = 12  # after so many steps there are still prefills to come
MODES = ("", "EXTEND", "DECODE")


@dataclass(frozen=True)
class Corruption:
    """form: a value, a swap or a rotation. to: which value, '' for the other forms.

    step: it strikes at the first chance from this step on, counted from the traffic's first.

    mode: only in a batch of this mode, '' for any. pool: full or swa, where there are two. request,
    place: which of them, as a share of how many there are. slot: in the page: first, middle, last.
    other: with which one it is swapped, as a share, too.
    """

    seed: int
    what: str
    moment: str
    to: str
    step: int
    mode: str
    pool: str
    request: float
    place: float
    slot: str
    form: str = VALUE
    other: float = 0.0

    @property
    def words(self) -> str:
        when = f"from step {self.step} on" + (f", {self.mode}" if self.mode else "")
        done = f"{EVERYWHERE[self.what][0]} := {TO.get(self.to, '')}"
        if self.form == SWAP:
            done = f"{EVERYWHERE[self.what][0]}, swapped with another"
        if self.form == ROTATE:
            done = f"{PAGES[self.what]}, rotated by one"
        return f"{done} ({self.moment}, {self.pool}, {when})"


def draw(seed: int, mtp: bool) -> Corruption:
    """The corruption of a seed. mtp: the server drafts; SPECULATIVE and VERIFY need that."""
    # Dice of their own: what the seeds below FORMS draw stays as it is.
    forms, form, other = random.Random(f"form {seed}"), VALUE, 0.0
    of_form = BOOKS_FORM if seed >= WIDER else FORM
    if seed >= FORMS:
        form, other = forms.choice(tuple(of_form)), forms.random()
    dice = random.Random(f"corruption {seed}")
    what = dice.choice([name for name in of_form[form] if mtp or name not in SPECULATIVE])
    moment = dice.choice([m for m in EVERYWHERE[what][1] if mtp or m != VERIFY])
    # A mode is no help where a batch is not known yet, or where there is only one.
    modes = MODES if moment in (STEP, FORWARD, METADATA, RESULT) else ("",)
    mode = dice.choice(modes) if what not in PREFILL_ONLY else "EXTEND"
    # The requests come at the beginning.
    last = PREFILLS if mode == "EXTEND" or moment == MATCH else STEPS * 3 // 4
    return Corruption(
        seed=seed,
        what=what,
        moment=moment,
        to="" if form != VALUE else dice.choice([to for to in TO if to not in NO.get(what, ())]),
        step=dice.randint(1, last),
        mode=mode,
        pool=dice.choice(("full", "swa")),
        request=dice.random(),
        place=dice.random(),
        slot=dice.choice(("first", "middle", "last")),
        form=form,
        other=other,
    )
