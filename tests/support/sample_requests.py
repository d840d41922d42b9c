"""A dump with the lives of some requests: one that ended, one in decode, one that waits."""

from __future__ import annotations

import dataclasses
from typing import Any

from sample_trap import FULL, SWA, sample_record

from g4debug.findings.record import PageEvent, RequestEvent, Step, TrapRecord
from g4debug.findings.status import LEDGER, Checked, TracerStatus

ENDED = "5f0c2a9e8d1b4c77a3e6f1029b8d4e10"
DECODES = "a81d03c4e7f24b6f9d5c0b2e6a1f3d98"
WAITS = "a81d9be2f7316a4f02b8c7d4e5f6a708"
LONG = "c4f7a6b81e2d4a909b3c5d7e8f012a3b"
EXTEND, DECODE = "schedule_batch.py:2914 prepare_for_extend", "eagle_utils.py:910 eagle_prepare"
WINDOW, END = "schedule_batch.py:4123 maybe_evict_swa", "batch_result_processor.py:1100 process"
EVICT = "swa_radix_cache.py:648 evict"
START = 1_780_283_655_000_000_000


def event(step: int, rid: str, kind: str, at: float, **more: Any) -> RequestEvent:
    return RequestEvent(step, START + int(at * 1e9), rid, kind, **more)


def taken(step: int, rid: str, pages: tuple[int, ...], caller: str = EXTEND) -> list[PageEvent]:
    kind = "extend" if caller == EXTEND else "decode"
    count = len(pages)
    return [PageEvent(step, kind, p, pages[:8], count, rid, caller) for p in ("full", "swa")]


def given(step: int, rid: str, pages: tuple[int, ...], caller: str, pool: str = "") -> list[Any]:
    kind = "evict" if caller == WINDOW else "free"
    pools = (pool,) if pool else ("full", "swa")
    return [PageEvent(step, kind, p, pages[:8], len(pages), rid, caller) for p in pools]


REQUESTS = (
    event(0, ENDED, "arrives", 0, tokens=700, longest=100, number=1),
    event(1, ENDED, "chunk", 0.01, begin=0, end=512, tokens=700, output=0),
    event(2, ENDED, "chunk", 0.05, begin=512, end=700, tokens=700, output=0),
    event(9, ENDED, "retracted", 0.4, tokens=708, output=8, allocated=768, evicted=128),
    event(9, LONG, "arrives", 0.4, tokens=1280, longest=10, number=2),
    *(
        event(10 + i, LONG, "chunk", 0.5 + i / 100, begin=128 * i, end=128 * i + 128,
              tokens=1280, output=0)
        for i in range(10)
    ),
    event(20, ENDED, "chunk", 1.4, begin=640, end=708, tokens=708, output=8),
    event(30, DECODES, "arrives", 2, tokens=96, longest=-1, number=3),
    event(31, DECODES, "chunk", 2.01, begin=64, end=96, tokens=96, output=0),
    event(60, "", "abort", 3, note="the server is going down"),
    event(60, "", "abort", 3, note="the server is going down"),
    event(61, ENDED, "ends", 3.2, tokens=748, output=48, allocated=768, evicted=192,
          note="abort: the server is going down, HTTP 503"),
    event(70, WAITS, "arrives", 4, tokens=300, longest=64, number=4),
    event(118, WAITS, "waits", 9.5, tokens=300, output=0, allocated=0, evicted=0,
          note="waiting queue"),
    event(118, DECODES, "runs", 9.5, tokens=183, output=87, allocated=192, evicted=64,
          note="batch"),
)  # fmt: skip
PAGES = [
    *taken(1, ENDED, tuple(range(1, 9))),
    *taken(2, ENDED, (9, 10, 12)),
    *given(7, ENDED, (1, 2), WINDOW, "swa"),
    *given(9, ENDED, (9, 10, 12), "base_prefix_cache.py:507 free_kv_row"),
    *taken(20, ENDED, (30, 31)),
    *taken(31, DECODES, (40,)),
    *taken(45, ENDED, (33,), DECODE),
    *taken(50, DECODES, (41,), DECODE),
    *given(61, "2 requests", (30, 31, 33, 60), END),
    *given(65, ENDED, (1, 2), EVICT, "full"),
    *taken(80, DECODES, (42,), DECODE),
    *given(90, DECODES, (40,), WINDOW, "swa"),
]


def step(number: int, *rids: str) -> Step:
    lengths = tuple(96 + number - 31 for _ in rids)
    return Step(number, "DECODE", rids, lengths, time_ns=START + number * 80_000_000)


def requests_record(**more: Any) -> TrapRecord:
    ledger = TracerStatus(LEDGER, checked=(Checked("events", len(PAGES), 90),))
    return dataclasses.replace(
        sample_record(),
        pools=(FULL, SWA),
        requests=REQUESTS,
        allocator=tuple(PAGES),
        steps=tuple(step(n, DECODES) for n in range(100, 119)),
        tracers=(ledger,),
        **more,
    )
