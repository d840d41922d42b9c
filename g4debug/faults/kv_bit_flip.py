"""Flips one bit in a live KV page, which is silent data corruption.

The bit is in one element of one token's K or V, in a complete page that the next decode step reads.
The argument is the number of the bit, 0 being the lowest. The two bits below the sign belong to the
exponent and do most harm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from g4debug.faults._kv import SPOILS, spoil
from g4debug.faults.base import Fault, Injection
from g4debug.faults.grammar import Action, GrammarError

if TYPE_CHECKING:
    import torch

INTEGERS = {1: "uint8", 2: "int16", 4: "int32"}  # torch's, by bytes of an element


def bit_of(action: Action) -> int | None:
    """The bit that an action asks for. Raises GrammarError for an unusable argument."""
    if not action.argument:
        return None
    if not action.argument.isdecimal() or int(action.argument) > 31:
        raise GrammarError(
            f"kv-bit-flip: {action.task}({action.argument}): expected a bit, 0 to 31"
        )
    return int(action.argument)


def flip(row: torch.Tensor, injection: Injection, action: Action) -> str:
    """Flip one bit of one element of ``row``, [heads, dim]."""
    import torch

    width = row.element_size()
    element, drawn = injection.random.randrange(row.numel()), injection.random.randrange(width * 8)
    asked = bit_of(action)
    bit = drawn if asked is None else asked % (width * 8)
    mask = 1 << bit
    if width > 1 and bit == width * 8 - 1:
        mask -= 1 << width * 8  # the sign
    before = float(row.view(-1)[element])
    row.view(-1).view(getattr(torch, INTEGERS[width]))[element] ^= mask
    after = float(row.view(-1)[element])
    return f"bit {bit} of element {element} ({before:.4g} is {after:.4g} now)"


def install(injection: Injection) -> None:
    for action in injection.chain.actions:
        bit_of(action)  # an unusable argument is an error at start
    spoil(injection, flip)


FAULT = Fault(
    id="kv-bit-flip",
    title="one bit of a live KV page flips",
    tasks=SPOILS,
    caught_by=("kv-integrity",),
    arguments=("on", "full", "swa", "draft"),
    drills=("1*full(30)", "1*swa(30)", "1*on(0)"),
)
