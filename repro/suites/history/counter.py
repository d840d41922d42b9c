"""The ground truth of a case: how often its bug was reached and triggered. Nothing of g4debug.

A case's truth is a module with ``install(counter)``. It wraps functions of SGLang, before any tool
does, and calls ``counter.reached()`` where the code with the bug runs, and ``counter.triggered()``
where it did the wrong thing. It changes nothing. Each count is written to a file at once, so it is
there even if the process is killed. If a truth itself fails, the engine ends by GroundTruthError.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MEMORY = "sglang.srt.mem_cache"
Look = Callable[..., Callable[[Any], None] | None]
SIZE = 512  # bytes of the record, padded: it is overwritten in place


@dataclass
class Counts:
    """steps: batches that the scheduler ran. first: the step of the first trigger, -1 if none.

    note: what the first trigger was, in a few words.
    """

    steps: int = 0
    reached: int = 0
    triggered: int = 0
    first: int = -1
    note: str = ""


class GroundTruthError(Exception):
    """A ground truth cannot look at this SGLang: a function or field that it uses is missing."""

    def __init__(self, error: Exception) -> None:
        text = re.sub(r" \(/.*\)", "", str(error))  # where a module lies on this machine
        super().__init__(f"{type(error).__name__}: {text}")


class Counter:
    """Counts in this process, and keeps a file up to date: one per process that counts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = -1
        self.counts = Counts()

    def step(self) -> None:
        self.counts.steps += 1
        self._write()

    def reached(self, times: int = 1) -> None:
        self.counts.reached += times
        self._write()

    def triggered(self, note: str = "", times: int = 1) -> None:
        if not self.counts.triggered:
            self.counts.first = self.counts.steps
            self.counts.note = note[:200]
        self.counts.triggered += times
        self._write()

    def _write(self) -> None:
        if self._file < 0:
            path = self._folder / f"truth-{os.getpid()}.json"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.pwrite(self._file, json.dumps(asdict(self.counts)).ljust(SIZE).encode(), 0)


def read(folder: Path) -> Counts:
    """The counts of the process that ran most steps: the scheduler. Zeros if nothing counted."""
    texts = [path.read_text() for path in folder.glob("truth-*.json")]
    found = [Counts(**json.loads(text)) for text in texts if text]  # one may just be begun
    return max(found, key=lambda c: (c.steps, c.reached, c.triggered), default=Counts())


def swa_allocator() -> Any:
    """The class that allocates from both pools. Before 0.5.13 it is in another module."""
    try:
        return importlib.import_module(f"{MEMORY}.allocator.swa").SWATokenToKVPoolAllocator
    except ModuleNotFoundError:
        return importlib.import_module(f"{MEMORY}.swa_memory_pool").SWATokenToKVPoolAllocator


def around(owner: Any, name: str) -> Callable[[Look], Look]:
    """A decorator: ``look(*args)`` runs before a call. It may return a function of the result."""

    def put(look: Look) -> Look:
        original = getattr(owner, name)

        @functools.wraps(original)
        def looked(*args: Any, **kwargs: Any) -> Any:
            then = _asked(look, *args, **kwargs)
            result = original(*args, **kwargs)
            if then is not None:
                _asked(then, result)
            return result

        setattr(owner, name, looked)
        return look

    return put


def _asked(look: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``look``. Raises GroundTruthError if it fails, which is no fault of SGLang's."""
    try:
        return look(*args, **kwargs)
    except Exception as e:
        raise GroundTruthError(e) from e
