"""Measures how long a request waits that arrives just when the server becomes idle.

    python benchmarks/census.py [--device cuda|cpu] --out FILE.csv [--rounds 2] [--seconds 300]
                                [--trunks 160]
    python benchmarks/census.py --table FILE.csv

The tracer pool-leak takes a census of all pages at that moment, and it looks at every node of the
prefix cache. So the cache is filled first, with some 100 nodes a trunk. Then one request after the
other is sent, each 0 to 5 ms after the last token of the one before, or 50 ms after it, when a
census is over. One server at a time is on the device: debugging off, five tracers armed, in
changing order. The model has E4B's layers, but only 7 of them and a small vocabulary, so that the
cache's KV fits and a forward does not hide the wait.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from measuring import models, options, overhead, results, tracers
from measuring.fleet import Fleet
from measuring.servers import ServerDied

PAGE_SIZE = 64
EDGE, LATER = (0, 1, 2, 5), 50  # ms after the last token of the request before
VARIANTS = ("off", "armed")


@dataclass(frozen=True)
class Size:
    """trunks, pages: of the prefix cache (``load.twigs``). edges: how many requests are timed."""

    trunks: int
    pages: int
    edges: int
    length: int  # of a timed request, in tokens


SIZES = {"cuda": Size(160, 64, 240, 100), "cpu": Size(3, 4, 12, 40)}


def engine(device: str) -> dict[str, Any]:
    if device == "cpu":
        return models.arguments("shallow", device, max_total_tokens=65_536)
    return models.arguments(
        "shallow",
        device,
        **models.FOR_64,
        max_total_tokens=1_600_000,
        swa_full_tokens_ratio=1.0,
        chunked_prefill_size=8192,
    )


def measure(args: argparse.Namespace, folder: Path) -> int:
    """Returns how many servers died."""
    tracers.installed()
    end, died, longest = time.monotonic() + args.seconds, 0, 0.0
    shared, size = engine(args.device), SIZES[args.device]
    size = replace(size, trunks=args.trunks or size.trunks)
    variants = tracers.under_load(VARIANTS, shared)
    plan = []
    for number in range(args.rounds):
        order = list(VARIANTS)
        random.Random(number).shuffle(order)
        plan += [(number, variant) for variant in order]
    shape = {"vocab": models.SHALLOW.vocab} if args.device == "cuda" else {}
    file, ahead = results.Growing(args.out), 4 if args.device == "cuda" else 1
    with Fleet([(f"{r}-{v}", v) for r, v in plan], variants, args.device, folder, ahead) as fleet:
        for server, (number, variant) in zip(fleet, plan, strict=False):
            begin = time.monotonic()
            if begin + 1.1 * longest > end:
                break
            try:
                device = server.start()["device"]
                fleet.quiet()
                tree = {"tree": size.trunks, "pages": size.pages, "page_size": PAGE_SIZE}
                server.put({**tree, "seed": 1, **shape})
                facts = server.facts()
                filled = time.monotonic() - begin
                print(f"{number} {variant}: {facts['nodes']} nodes, {filled:.0f} s", flush=True)
                tracers.check(variant, facts)
                asked = {"edges": [*EDGE, LATER, LATER], "seed": number, "count": size.edges}
                tokens = {"length": size.length, "tokens": 4}
                rows = server.put({**asked, **tokens, **shape})["rows"]
                at = {"round": number, "variant": variant, "nodes": facts["nodes"]}
                file.add([{**at, **row} for row in rows], device)
                took = time.monotonic() - begin
                print(f"{number} {variant}: {len(rows)} requests, {took:.0f} s", flush=True)
            except ServerDied as e:
                died += 1
                print(e, flush=True)
            longest = max(longest, time.monotonic() - begin)
    return died


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown: the first token's time at the edge and later, of each variant."""
    lines = [
        "| | nodes | requests | median | 99th percentile | longest |",
        "|---|---|---|---|---|---|",
    ]
    for variant, said in (("off", "debugging off"), ("armed", "five tracers armed")):
        for later, when in ((False, "as it becomes idle"), (True, f"{LATER} ms later")):
            mine = [r for r in rows if r["variant"] == variant]
            # The first request of a server has none before it.
            times = [
                float(r["ttft_ms"])
                for r in mine
                if (int(r["delay_ms"]) == LATER) == later and int(r["number"])
            ]
            if times:
                nodes = statistics.median(int(r["nodes"]) for r in mine)
                middle, late = statistics.median(times), overhead.percentile(times, 99)
                lines.append(
                    f"| {said}, {when} | {nodes:,.0f} | {len(times)} | {middle:.1f} ms "
                    f"| {late:.1f} ms | {max(times):.1f} ms |"
                )
    return lines


def main() -> int:
    parser = options.parser(__doc__, "cuda", rounds=2, out="the CSV")
    parser.add_argument("--seconds", type=int, default=300, help="start no server after these")
    parser.add_argument("--trunks", type=int, help="of the prefix cache; fewer fill it faster")
    parser.add_argument("--table", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.table:
        print("\n".join(table(results.read(args.table)[1])))
        return 0
    if not args.out:
        parser.error("--out is needed: the CSV to write")
    with tempfile.TemporaryDirectory(prefix="g4debug-census-") as folder:
        died = measure(args, Path(folder))
    print("\n".join(table(results.read(args.out)[1])))
    return 1 if died else 0


if __name__ == "__main__":
    raise SystemExit(main())
