"""Where and when a wrong hand-over of ``batch.spec_info`` was seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HandOver:
    """Where a violation was seen."""

    site: str  # "batch.merge"
    label: str  # its name in the history: "merge"
    batch: Any
    rids: tuple[str, ...]
    step: int = 0  # the step that the violation belongs to, 0: the one that began last
