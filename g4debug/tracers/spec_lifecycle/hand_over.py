"""Where and when a wrong hand-over of ``batch.spec_info`` was seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Left:
    """A verify input that a worker's forward left behind: harmless until the batch goes on."""

    step: int
    requests: int
    live: int  # how many of them had not finished


@dataclass(frozen=True)
class HandOver:
    """Where a violation was seen."""

    site: str  # "batch.merge"
    label: str  # its name in the history: "merge"
    batch: Any
    rids: tuple[str, ...]
    left: Left | None = None  # when the verify input was left behind, if it was
    repairing: bool = False  # fix spec-batch-guards is in force
    v2: bool = False  # speculative decoding v2
    step: int = 0  # the step that the violation belongs to, 0: the one that began last
