"""Measures how long the scheduler's host is in the tracers' hooks, for prefills and for decodes.

    python benchmarks/host_time.py [--device cuda|cpu] --out FILE.csv [--variants armed,kv-writes]
                                   [--rounds 3] [--model E4B]
    python benchmarks/host_time.py --table FILE.csv [--sites 6]

One server of each variant, one after the other. ``served/clock.py`` tells for each place that
g4debug hooks how long our code there took; SGLang's own function, which runs in between, does not
count. Requests of one token each are prefills only; requests of 150 tokens with short prompts are
nearly only decodes. Two servers are never compared, so it does not matter that one is faster than
the other. A hook's waiting is in its time, even if SGLang would have waited a moment later: so the
figures are an upper bound for the tracers' time on the host.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from measuring import models, options, results, tracers
from measuring.fleet import Fleet, Gated
from measuring.servers import ServerDied

# Phase -> a question to the server, besides batch, seed and count.
PHASES: dict[str, dict[str, int]] = {
    "prefill": {"tokens": 1},
    "decode": {"tokens": 150, "prompt": 100},
}
# Device -> requests at a time -> how many in all.
COUNTS = {"cuda": {1: 24, 8: 48, 64: 128}, "cpu": {1: 4, 4: 8}}


def ask(
    server: Gated, load: tracers.Load, phase: str, batch: int, count: int, seed: int
) -> list[dict[str, Any]]:
    """Rows of one phase: one for each site, and the one of all together with its name ''."""
    question = {"serve": batch, "seed": seed, "count": count, **PHASES[phase]}
    before = server.facts()
    rows = tracers.put(server, load, question)
    after = server.facts()
    steps = after["steps"] - before["steps"]
    figure = "ttft_ms" if phase == "prefill" else "step_ms"
    shared = {
        "phase": phase,
        "batch": batch,
        "steps": steps,
        "request_ms": round(statistics.median(float(r[figure]) for r in rows), 3),
    }
    old = before["clock"]
    spent = {
        site: (calls - old.get(site, [0, 0])[0], seconds - old.get(site, [0, 0])[1])
        for site, (calls, seconds) in after["clock"].items()
    }
    spent = {"": tuple(map(sum, zip(*spent.values(), strict=True))), **spent}
    return [
        {**shared, "site": site, "calls": int(calls), "ms_per_step": round(1e3 * s / steps, 5)}
        for site, (calls, s) in spent.items()
        if calls
    ]


def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    tracers.installed()
    shared = tracers.engine(args.device, (), model=args.model)
    load = tracers.loaded(args, quick=False)
    variants = {
        name: replace(variant, plugin="clock")
        for name, variant in tracers.under_load(args.variants, shared).items()
    }
    found: list[dict[str, Any]] = []
    file = results.Growing(args.out)
    plan = [(name, name) for name in args.variants]
    with Fleet(plan, variants, args.device, folder, ahead=1) as fleet:
        for server, (name, _) in zip(fleet, plan, strict=True):
            device = server.start()["device"]
            fleet.quiet()
            tracers.check(name, server.facts())
            for number in range(args.rounds + 1):
                for phase in PHASES:
                    for batch, count in COUNTS[args.device].items():
                        rows = ask(server, load, phase, batch, count, 1 + 10 * number + batch)
                        if number:  # the first round compiles kernels
                            rows = [{"variant": name, "round": number, **row} for row in rows]
                            file.add(rows, device)
                            found += rows
    return found


def table(rows: Sequence[Mapping[str, Any]], sites: int) -> list[str]:
    """Markdown: a line for each variant, phase and batch, and the sites that take most."""
    lines = [
        "| variant | batch | what | steps | ours, a step | the request's | most of it |",
        "|---|---|---|---|---|---|---|",
    ]
    keys = dict.fromkeys((r["variant"], r["phase"], str(r["batch"])) for r in rows)
    for variant, phase, batch in keys:
        mine = [
            r
            for r in rows
            if (r["variant"], r["phase"], str(r["batch"])) == (variant, phase, batch)
        ]
        by_site: dict[str, list[float]] = {}
        for row in mine:
            by_site.setdefault(row["site"], []).append(float(row["ms_per_step"]))
        ours = statistics.median(by_site.pop(""))
        most = sorted(by_site.items(), key=lambda item: -statistics.median(item[1]))[:sites]
        said = ", ".join(f"`{site}` {statistics.median(ms):.2f}" for site, ms in most)
        steps = sum(int(r["steps"]) for r in mine if not r["site"])
        request = statistics.median(float(r["request_ms"]) for r in mine)
        name = "first token" if phase == "prefill" else "step"
        lines.append(
            f"| {variant} | {batch} | {phase} | {steps} | {ours:.2f} ms "
            f"| {name} {request:.1f} ms | {said} |"
        )
    return lines


def main() -> int:
    parser = options.parser(__doc__, "cuda", rounds=3, out="the CSV")
    parser.add_argument("--variants", type=lambda t: t.split(","), default=["armed"])
    parser.add_argument(
        "--model", choices=models.NAMES, default="E4B", help="on a GPU (default: E4B)"
    )
    parser.set_defaults(contexts=())  # prompts that share beginnings
    parser.add_argument("--table", type=Path, metavar="FILE")
    parser.add_argument("--sites", type=int, default=6, help="how many the table names")
    args = parser.parse_args()
    if args.table:
        print("\n".join(table(results.read(args.table)[1], args.sites)))
        return 0
    if args.out is None:
        parser.error("--out FILE is missing")
    unknown = set(args.variants) - set(tracers.VARIANTS)
    if unknown:
        parser.error(f"unknown variants {sorted(unknown)}")
    with tempfile.TemporaryDirectory(prefix="g4debug-host-") as folder:
        try:
            rows = measure(args, Path(folder))
        except ServerDied as e:
            print(e, file=sys.stderr)
            return 1
    print("\n".join(table(rows, args.sites)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
