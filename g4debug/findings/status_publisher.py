"""Tells the status of a running scheduler to ``g4debug doctor --pid`` and to ``/metrics``.

It is called in each round of SGLang's event loop, which mostly costs one look at the clock. A
scheduler that is stuck tells nothing any more, and ``doctor --pid`` sees that from the age of the
last status.

Of a dump that somebody asks for the event loop makes a copy in memory. A thread encodes and writes
it, and the status after that says where it is. One is made at a time; who asks meanwhile waits.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from g4debug.findings import warnings
from g4debug.findings.metrics import Metrics, labels_of, wanted
from g4debug.findings.status import Status
from g4debug.findings.status_file import StatusFile, StatusFileError

logger = logging.getLogger("g4debug")
EVERY = 1.0  # seconds


class _Dump(threading.Thread):
    """Writes the dump that was asked for. answer: what is told of it, once the thread has ended."""

    def __init__(self, asked: bytes, write: Callable[[], tuple[str, str]]) -> None:
        super().__init__(name="g4debug-dump", daemon=True)
        self.asked, self._write = asked, write
        self.answer = answer(asked, "", "")

    def run(self) -> None:
        try:
            self.answer = answer(self.asked, *self._write())
        except Exception as e:  # who asked must not wait for nothing
            logger.exception("g4debug: a dump that was asked for was not written")
            self.answer = answer(self.asked, "", f"{type(e).__name__}: {e}")


def answer(asked: bytes, path: str, problem: str) -> dict[str, str]:
    return {"asked": asked.hex(), "dump": path, "no_dump": problem}


class StatusPublisher:
    """about: what else ``doctor --pid`` shows, in plain values: version, role, dump directory."""

    def __init__(self, status: Status, about: Mapping[str, Any]) -> None:
        self.status = status
        self.about = {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "pid": os.getpid(),
            **about,
        }
        self.rank = ""
        self.warnings: list[str] = []
        self.phase = "starting"  # until the event loop makes its first round: "serving"
        self.metrics: Metrics | None = None
        self.board: StatusFile | None = None
        self._due = 0.0
        self._asked = b""
        self._answer: dict[str, str] = {}
        self._dump: _Dump | None = None  # that is being written

    def open(self) -> None:
        """Begin to show the status. Raises StatusFileError if it cannot be shown here."""
        self.board = StatusFile()
        self.tell(time.monotonic())

    def close(self) -> None:
        """Show no status any more."""
        if self.board is not None:
            self.board.close()
            self.board = None

    def attach(self, scheduler: Any) -> None:
        """The scheduler is there: learn its rank, and what it does that one should know."""
        labels = labels_of(scheduler)
        self.rank = ", ".join(
            f"{k.removesuffix('_rank')} {v}" for k, v in labels.items() if k.endswith("_rank")
        )
        self.warnings = list(warnings.of(scheduler))
        for line in self.warnings:
            logger.warning("g4debug: %s", line)
        if wanted(scheduler):
            self.metrics = Metrics(self.status, labels)
        self.tell(time.monotonic())

    def beat(self) -> None:
        """Tell the status if it is due. Called in each round of the event loop."""
        self.phase = "serving"
        now = time.monotonic()
        if now >= self._due:
            self.tell(now)

    def tell(self, now: float) -> None:
        """Tell the status now. ``now``: of the monotonic clock, which all processes share."""
        self._due = now + EVERY
        if self.board is not None:
            self._answer_to(self.board.asked())
            try:
                self.board.write(self._content(now))
            except StatusFileError:
                self.board.close()  # what it shows would be taken for the truth
                self.board = None
                raise
        if self.metrics is not None:
            try:
                self.metrics.update()
            except Exception:  # what doctor --pid shows would look like a stuck scheduler's
                self.metrics = None
                logger.exception("g4debug: /metrics is not told any more. Please report this.")

    def _answer_to(self, asked: bytes) -> None:
        """Begin the dump that somebody asked for since the last time, and tell of one that is done.

        The copy is made here, between two steps; a thread writes it.
        """
        if self._dump is not None:
            if self._dump.is_alive():
                return
            self._answer, self._dump = self._dump.answer, None
        if asked == self._asked:
            return
        self._asked = asked
        snapshot = self.status.snapshot
        if snapshot is None:
            self._answer = answer(asked, "", "the flight recorder is not armed")
            return
        dump = _Dump(asked, snapshot())
        try:
            dump.start()
        except RuntimeError as e:
            self._answer = answer(asked, "", f"no thread can be started: {e}")
            return
        self._dump = dump

    def _content(self, now: float) -> dict[str, Any]:
        stands, waits = self.status.waits()
        return {
            **self.about,
            "rank": self.rank,
            "serves": self.status.serves,
            "phase": self.phase,
            "step": self.status.clock.step,
            "told": now,
            **self._answer,
            "warnings": self.warnings,
            "stands": stands,
            "waits": waits,
            "tracers": [record.plain() for record in self.status.records()],
        }
