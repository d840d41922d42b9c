"""A plugin for SGLang: while requests are decoded, g4debug's hooks take turns of a few steps.

``gate.py`` switches the hooks for whoever sends it a signal, so a turn lasts as long as some
requests do, and in that time a machine drifts by more than the hooks cost. Here the scheduler
switches them by itself, every ``STEPS`` steps of one long decode. Turns come in blocks of six: one
of each of three kinds (``ARMS``: without hooks, without hooks again, and with them), in an order
that is drawn anew for each block, and then the same in the opposite order. A step takes longer the
longer its requests are, and what grows evenly within a block cancels out between the two turns of a
kind. The two kinds that are alike say how far the third can be trusted.

A turn is one of decode steps of one batch. Another batch (a prefill, a request that came or ended)
ends it: its block begins again, and the hooks are in place until then. The time of a step is from
its launch to the next one's; the first ``SKIPPED`` of a turn are left out, since with overlap
scheduling they are still the turn's before.

There are turns while the file ``<gate>.turns`` is there; it is looked for in each prefill. Without
it the hooks are switched by signals alone, as ``gate.py`` says.

Only for servers without a page ledger (``watch``, the flight recorder): a ledger that misses what
is handed out in a turn without hooks could not be believed afterwards.

``gate.py`` writes ``turns``, one list for each turn of the blocks that were whole since the last
SIGUSR2: block, arm, requests of the batch, steps, and their mean and median in ms.
"""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from served import gate

STEPS, SKIPPED = 24, 4
OFF, AGAIN, ON = "off", "off again", "on"
ARMS = (OFF, AGAIN, ON)
VARIABLE = "BENCHMARK_TURN"  # so many steps, in place of STEPS
LAUNCH = "scheduler.run_batch"
Turn = tuple[int, str, int, int, float, float]


@dataclass
class Turns:
    """Whose turn it is. switch: called with True to put the hooks in place, with False to let
    SGLang pass by them. wanted: whether there are turns now. steps: of a turn, those that are left
    out among them.
    """

    switch: Callable[[bool], None]
    wanted: Callable[[], bool]
    steps: int = STEPS
    seed: int = 0
    done: list[Turn] = field(default_factory=list)
    _block: int = 0
    _order: list[str] = field(default_factory=list)
    _kept: list[Turn] = field(default_factory=list)  # of the block that is not whole yet
    _at: list[float] = field(default_factory=list)  # when each step of this turn was launched
    _batch: int = 0
    _on: bool = False  # there were turns to be when the last prefill was launched

    def launch(self, decodes: bool, requests: int, now: float) -> None:
        """A step is about to be launched. now: in seconds."""
        if self._at and not (decodes and requests == self._batch):
            self._void()
        if not decodes:
            self._on = self.wanted()
        if not decodes or not self._on:
            return
        self._batch = requests
        self._at.append(now)
        if len(self._at) > self.steps:  # the launch that ends the last step of the turn
            self._end()
            self._at = [now]
        if len(self._at) == 1:
            self._begin()

    def _begin(self) -> None:
        if not self._order:
            arms = order(self.seed, self._block)
            self._order = [*arms, *reversed(arms)]
        self.switch(self._order[0] == ON)

    def _end(self) -> None:
        times = [1e3 * (after - before) for before, after in pairwise(self._at[SKIPPED:])]
        mean, median = statistics.fmean(times), statistics.median(times)
        arm = self._order.pop(0)
        self._kept.append((self._block, arm, self._batch, len(times), mean, median))
        if not self._order:
            self.done += self._kept
            self._kept = []
            self._block += 1

    def _void(self) -> None:
        self._at, self._order, self._kept = [], [], []
        self.switch(True)


def order(seed: int, block: int) -> list[str]:
    """The kinds of turns in a block's own order."""
    return random.Random(f"{seed}.{block}").sample(ARMS, len(ARMS))


def register() -> None:
    from g4debug import plugin
    from g4debug.hooking.hooks import Around, Hooks

    if not os.environ.get(gate.VARIABLE) or plugin.role() != "scheduler":
        return
    wanted = Path(f"{os.environ[gate.VARIABLE]}.turns").exists
    turns = Turns(_switch, wanted, int(os.environ.get(VARIABLE) or STEPS))
    gate.register()
    compose, facts, mine = Hooks._compose, gate.facts, threading.get_ident()

    def timed(hooks: Hooks, site: str) -> Around:
        whole = compose(hooks, site)
        if site != LAUNCH:
            return whole

        def hook(original: Around, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == mine:
                decodes = bool(batch.forward_mode.is_decode())
                turns.launch(decodes, len(batch.reqs), time.perf_counter())
            return whole(original, scheduler, batch, *args, **kwargs)

        return hook

    def told(scheduler: Any) -> dict[str, Any]:
        done, turns.done = turns.done, []
        return {**facts(scheduler), "turns": done}

    Hooks._compose = timed  # type: ignore[method-assign]
    gate.facts = told


def _switch(on: bool) -> None:
    if gate.ledgers:
        raise RuntimeError("hooks cannot take turns of steps beside a page ledger")
    gate.armed = on
