"""What the black box costs the host: a step is recorded in three ways, in turns.

    python benchmarks/black_box.py [--rounds N] [--out FILE]

It needs no SGLang and no GPU; the requests are stand-ins. *Objects* is what the flight recorder
kept of a step before it kept bytes: a list of each field. *Bytes* is what it keeps now, without the
box, and *box* the same with the box, and with the note of what was checked once in a second. The
goal: *box* takes no longer than *objects*. An event of an allocator is measured in the same way, as
the ledger enters it: *objects* makes it as it was made before there was a box, *bytes* is the
object of today, and with *box* the bytes of the box come beside it. --out: CSV with a line of each
round.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from g4debug.findings.record import PageEvent
from g4debug.findings.steps import Recorder, pool_sizes
from g4debug.hooking import req_kv
from g4debug.ledger.books import Pages, PoolLedger
from g4debug.ledger.ledger import Ledger
from g4debug.ledger.page_history import SHOWN
from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.flight_recorder.boxing import Boxing
from g4debug.tracers.flight_recorder.completed_steps import Waited
from g4debug.trapping.describe import device, versions

CALLS = 500
PATHS = tuple(f"kv.{name}" for name in req_kv.OF_STEP)
GETTERS = {PATHS: attrgetter(*PATHS)}


def batch(rows: int) -> SimpleNamespace:
    requests = [
        SimpleNamespace(
            rid=f"{row:032x}",
            kv=SimpleNamespace(
                req_pool_idx=row,
                kv_committed_len=900 + row,
                kv_allocated_len=960 + row,
                swa_evicted_seqlen=0,
            ),
        )
        for row in range(rows)
    ]
    return SimpleNamespace(
        reqs=requests,
        seq_lens_cpu=torch.arange(rows) + 900,
        forward_mode=SimpleNamespace(name="DECODE"),
        spec_info=None,
    )


def scheduler() -> SimpleNamespace:
    allocator = SimpleNamespace(
        size_full=64 * 4096,
        size_swa=64 * 2048,
        page_size=64,
        full_available_size=lambda: 64 * 4000,
        swa_available_size=lambda: 64 * 2000,
    )
    return SimpleNamespace(token_to_kv_pool_allocator=allocator, waiting_queue=[])


class Objects(Recorder):
    """Keeps of a step what was kept before it was bytes (commit e224649)."""

    def record(self, batch: SimpleNamespace) -> None:
        requests = batch.reqs
        rids = [str(request.rid) for request in requests]
        assert not req_kv.evicts_by_component(requests)
        held = requests[0].kv
        paths = tuple(f"kv.{n}" if hasattr(held, n) else n for n in req_kv.OF_STEP)
        rows, *lengths = map(list, zip(*map(GETTERS[paths], requests), strict=True))
        if None in rows:
            raise AssertionError
        self.by_row = {row: rid for row, rid in zip(rows, rids, strict=True) if row >= 0}
        host = batch.seq_lens_cpu
        spec = getattr(batch, "spec_info", None)
        used = [tokens - available for _, tokens, available in pool_sizes(self.scheduler)]
        waiting = getattr(self.scheduler, "waiting_queue", None)
        kept = (
            self.step,
            batch.forward_mode.name if batch.forward_mode else "",
            rids,
            host.tolist() if host is not None else [],
            "" if spec is None else type(spec).__name__,
            used,
            time.time_ns(),
            -1 if waiting is None else len(waiting),
            rows,
            *lengths,
        )
        self._kept.append(kept)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Event:
    """A ``PageEvent`` as it was: with the ``__init__`` that a frozen dataclass gets (65047104)."""

    step: int
    kind: str
    pool: str
    pages: tuple[int, ...]
    count: int
    request: str = ""
    caller: str = ""
    note: str = ""
    stopped: bool = False


class Entering(Ledger):
    """Makes an event as it was made before there was a box (commit 65047104)."""

    def event(self, pool: PoolLedger, kind: str, pages: Pages, **words: Any) -> Any:
        step, named = self.transport.step, tuple(pages[:SHOWN].tolist())
        if step is None:
            step = self.recorder.step + self.recorder.preparing
        return Event(step, kind, pool.name, named, len(pages), **words)


def microseconds(work: Callable[[], object]) -> float:
    begin = time.thread_time()  # another process may take this core meanwhile
    for _ in range(CALLS):
        work()
    return (time.thread_time() - begin) / CALLS * 1e6


def compared(what: str, rounds: int, ways: dict[str, Callable[[], object]]) -> list[dict[str, Any]]:
    """Time the ways in turns, and print their medians and ratios to the first, with the quartiles.

    Returns the microseconds of each round.
    """
    for way in ways.values():
        way()
    turns = [{name: microseconds(way) for name, way in ways.items()} for _ in range(rounds)]
    first, words = next(iter(ways)), []
    for name in ways:
        ratios = sorted(turn[name] / turn[first] for turn in turns)
        words.append(
            f"{name} {statistics.median(turn[name] for turn in turns):.1f} us, "
            f"{statistics.median(ratios):.2f} ({ratios[rounds // 4]:.2f} to "
            f"{ratios[rounds * 3 // 4]:.2f})"
        )
    print(f"{what}: {'; '.join(words)}")
    return [
        {"what": what, "round": n, **{name: f"{us:.2f}" for name, us in turn.items()}}
        for n, turn in enumerate(turns, 1)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=99)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)  # as on a busy host
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        context = Context.alone("flight-recorder", Settings(debug=True, debug_dir=Path(folder)))
        recorder = context.recorder
        recorder.scheduler = scheduler()
        boxing = Boxing(context, Waited(recorder), lambda: "")
        boxing.begin()
        before = Objects(64)
        before.scheduler = recorder.scheduler
        try:
            for count in (1, 8, 64, 256):
                one = batch(count)

                def as_objects(one: SimpleNamespace = one) -> None:
                    before.begin_step(one)

                def as_bytes(one: SimpleNamespace = one) -> None:
                    recorder.also = None
                    recorder.begin_step(one)

                def boxed(one: SimpleNamespace = one) -> None:
                    recorder.also = boxing.step
                    recorder.begin_step(one)
                    boxing.returned(None)

                ways = {"objects": as_objects, "bytes": as_bytes, "box": boxed}
                rows += compared(f"a step of {count} requests", args.rounds, ways)
            pool = PoolLedger("full", pages=4096, page_size=64)
            old, ledger = Entering(recorder), Ledger(recorder)
            pages, words = np.array([7, 8, 9]), {"request": "r" * 32}
            words["caller"] = "schedule_batch.py:2013 alloc_for_decode"

            def event(ledger: Ledger, also: Callable[[PageEvent], None] | None = None) -> None:
                ledger.log.also = also
                ledger.enter(pool, "extend", pages, holds=True, **words)

            ways = {
                "objects": lambda: event(old),
                "bytes": lambda: event(ledger),
                "box": lambda: event(ledger, boxing.event),
            }
            rows += compared("an event", args.rounds, ways)
        finally:
            boxing.remove()
    if args.out:
        command = f"python benchmarks/black_box.py --rounds {args.rounds}"
        with args.out.open("w", newline="") as file:
            file.write(f"# {json.dumps({**versions(), **device(), 'command': command})}\n")
            writer = csv.DictWriter(file, ("what", "round", "objects", "bytes", "box"))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
