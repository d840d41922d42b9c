"""STANDALONE: EAGLE's worker, with a model of its own as the draft, which reads no hidden states.

So none are handed over, and what is said of them elsewhere is not asked here.
"""

from __future__ import annotations

from dataclasses import replace

from g4debug.hooking.targets import CPU
from g4debug.speculation import eagle

NAME = "STANDALONE"

ADAPTER = replace(
    eagle.ADAPTER,
    name=NAME,
    runs=lambda algorithm: eagle.named(algorithm, NAME),
    hidden=False,
    hands_hidden=False,
    run={"0.5.15.post1": (CPU,), "0.5.23": (CPU,)},
)
