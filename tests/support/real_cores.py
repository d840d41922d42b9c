"""Real CUDA core dumps of ``tests/gpu/make_cores.py``, and what was broken in each."""

from __future__ import annotations

import json
import lzma
from functools import cache
from pathlib import Path
from typing import Any

from g4debug.findings.memory_map import KV, SEGMENT, MemoryMap, MemoryRange
from g4debug.findings.record import Finding, Location, Step, TrapRecord

FOLDER = Path(__file__).resolve().parents[1] / "autopsy" / "cores"
NAMES = sorted(path.name.removesuffix(".core.xz") for path in FOLDER.glob("*.core.xz"))


@cache
def core(name: str) -> bytes:
    return lzma.decompress((FOLDER / f"{name}.core.xz").read_bytes())


@cache
def truth(name: str) -> dict[str, Any]:
    """What was broken, and where each buffer was."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def memory(name: str, segments: bool = True) -> MemoryMap:
    """The map that the process would have had."""
    told = truth(name)
    ranges = [
        MemoryRange(
            b["address"],
            b["nbytes"],
            KV if "pool" in b else "buffer",
            b["name"],
            pool=b.get("pool", ""),
            runner="target" if "pool" in b else "",
            layer=b.get("layer", -1),
            part=b.get("kv", "").upper(),
            dtype=b["dtype"].removeprefix("torch."),
            page_bytes=b.get("page_bytes", 0),
            page_size=told["page_size"] if "pool" in b else 0,
        )
        for b in told["buffers"]
        if b["name"] != "given_back"
    ]
    if segments:
        ranges += [
            MemoryRange(s["address"], s["nbytes"], SEGMENT) for s in told.get("segments", ())
        ]
    ordered = tuple(sorted(ranges, key=lambda r: (r.start, -r.nbytes)))
    return MemoryMap(ordered, step=0, device="cuda:0", segments=segments)


def record(name: str, rows: int = 8, segments: bool = True, **fields: Any) -> TrapRecord:
    """The dump of that process: two steps, in which each row had the same request."""
    rids = tuple(f"request-{row}" for row in range(rows))
    steps = tuple(Step(n, "DECODE", rids, (300,) * rows) for n in (6, 7))
    finding = Finding("flight-recorder", "cuda-error", "", "g4debug: died", Location(), "", "")
    known = {"created": "", "memory": memory(name, segments), "steps": steps}
    return TrapRecord(finding, **{**known, **fields})
