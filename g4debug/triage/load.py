"""What SGLang's statistics say of a server that is slow: one pool full, or a queue and no batch."""

from __future__ import annotations

import re
from datetime import datetime

from g4debug.triage.patterns import IDLE_QUEUE, UNEVEN, Pattern

FAR = 0.5  # by so much the usages of two pools differ
LASTS = 60  # seconds
_USAGE = re.compile(rb"full token usage: ([\d.]+).*?swa token usage: ([\d.]+)")
_RUNS = re.compile(rb"#running-req: (\d+)")
_WAITS = re.compile(rb"#queue-req: (\d+)")


class Load:
    """Follows the statistics of one launch. even: by the last of them no pool is full alone."""

    def __init__(self) -> None:
        self.even = False
        self._since: dict[str, datetime] = {}
        self._told: set[str] = set()

    def take(self, data: bytes, at: datetime | None) -> Pattern | None:
        """What a line of statistics tells for the first time, None if it tells nothing."""
        usage = _USAGE.search(data) if b"full token usage" in data else None
        if usage is None and b"#queue-req: 0" in data:  # so are most
            self._since.clear()
            return None
        waits = (found := _WAITS.search(data)) is not None and found[1] != b"0"
        uneven = False
        if usage is not None:
            try:
                uneven = abs(float(usage[1]) - float(usage[2])) >= FAR
            except ValueError:
                return None
            self.even = not uneven
        if b"Decode batch" not in data and b"#new-seq: 0," not in data:
            self._since.pop(IDLE_QUEUE.where, None)
            return None
        runs = (found := _RUNS.search(data)) is None or found[1] != b"0"
        for pattern, holds in ((UNEVEN, uneven and waits), (IDLE_QUEUE, waits and not runs)):
            if self._lasts(pattern.where, holds, at):
                return pattern
        return None

    def _lasts(self, name: str, holds: bool, at: datetime | None) -> bool:
        if not holds or at is None:
            self._since.pop(name, None)
            return False
        since = self._since.setdefault(name, at)
        if name in self._told or (at - since).total_seconds() < LASTS:
            return False
        self._told.add(name)
        return True
