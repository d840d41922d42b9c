"""The tools that are compared: their switches, and how their alarm is known in a log."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

LEAK: Final = r"memory leak detected|pool memory leak|mem(?:ory)? leak|Pool invariant"


@dataclass(frozen=True)
class Tool:
    """since: the first release that has it. alarm: in the log. needs: why no CPU can run it."""

    id: str
    title: str
    environ: Mapping[str, str] = field(default_factory=dict)
    alarm: str = ""
    since: str = ""
    needs: str = ""

    def alarmed(self, log: str) -> re.Match[str] | None:
        return re.search(self.alarm, log) if self.alarm else None
