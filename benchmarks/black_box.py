"""What the black box costs the host: a step is recorded with it and without it, in turns.

    python benchmarks/black_box.py [--rounds N]

It needs no SGLang and no GPU; the requests are stand-ins. *Before* is what the flight recorder did
for a step without the box, *now* is the same with the box, and with the note of what was checked
once in a second. The goal: the box adds at most what a record costs without it. An event of an
allocator is measured in the same way, as the ledger enters it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import torch

from g4debug.findings.record import PageEvent
from g4debug.ledger.books import PoolLedger
from g4debug.ledger.ledger import Ledger
from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.flight_recorder.boxing import Boxing
from g4debug.tracers.flight_recorder.completed_steps import Waited

CALLS = 2000


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


def microseconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    for _ in range(CALLS):
        work()
    return (time.perf_counter() - begin) / CALLS * 1e6


def compared(
    what: str, rounds: int, before: Callable[[], object], now: Callable[[], object]
) -> None:
    """Print the medians, and the ratio of each round with its range."""
    before(), now()
    pairs = [(microseconds(before), microseconds(now)) for _ in range(rounds)]
    was, is_ = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratios = sorted(n / b for b, n in pairs)
    print(
        f"{what}: before {was:.1f} us, now {is_:.1f} us, ratio {statistics.median(ratios):.2f} "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)  # as on a busy host
    with TemporaryDirectory() as folder:
        context = Context.alone("flight-recorder", Settings(debug=True, debug_dir=Path(folder)))
        recorder = context.recorder
        recorder.scheduler = scheduler()
        boxing = Boxing(context, Waited(recorder), lambda: "")
        boxing.begin()
        try:
            for rows in (1, 8, 64, 256):
                one = batch(rows)

                def record(one: SimpleNamespace = one) -> None:
                    recorder.also = None
                    recorder.begin_step(one)

                def boxed(one: SimpleNamespace = one) -> None:
                    recorder.also = boxing.step
                    recorder.begin_step(one)
                    boxing.returned(None)

                compared(f"a step of {rows} requests", rounds, record, boxed)
            ledger, pool = Ledger(recorder), PoolLedger("full", pages=4096, page_size=64)
            pages, words = np.array([7, 8, 9]), {"request": "r" * 32}
            words["caller"] = "schedule_batch.py:2013 alloc_for_decode"

            def event(also: Callable[[PageEvent], None] | None) -> None:
                ledger.log.also = also
                ledger.enter(pool, "extend", pages, holds=True, **words)

            compared("an event", rounds, lambda: event(None), lambda: event(boxing.event))
        finally:
            boxing.remove()


if __name__ == "__main__":
    main()
