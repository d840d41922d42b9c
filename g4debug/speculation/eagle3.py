"""EAGLE3: EAGLE's worker, with a draft on the hidden states of several of the target's layers."""

from __future__ import annotations

from dataclasses import replace

from g4debug.hooking.targets import CPU, H200
from g4debug.speculation import eagle

NAME = "EAGLE3"

ADAPTER = replace(
    eagle.ADAPTER,
    name=NAME,
    runs=lambda algorithm: eagle.named(algorithm, NAME),
    run={"0.5.15.post1": (CPU,), "0.5.23": (CPU, H200)},
)
