"""Measures what the hooks of ``watch`` cost a server, in turns of a few steps of that one server.

    python benchmarks/in_turn.py --out FOLDER [--seconds 540] [--device cuda|cpu]
        [--variant watch] [--model E4B-32k] [--seed 1] [--rounds 1000] [--quick]
    python benchmarks/in_turn.py --judge FOLDER [--csv FILE]

Two servers that run the same code differ by up to 3 % of a step for as long as they live, and one
server drifts by as much within minutes. The goal of ``watch`` is 0.5 %. So one server is measured
here, and its hooks are taken out of the way and put back so often that no drift counts:

* **steps**: 1, 8 and 64 requests are decoded for long, and every 24 steps the next turn begins
  (served/turns.py). steps.csv has a row for each turn.
* **prompts**: requests of 1,000 tokens in and one out, which share nothing; 1, 8 or 64 of them are
  a turn. The prefix cache evicts from the second turn on.
* **served**: requests with shared beginnings and 32 to 160 tokens out; twice as many as run at a
  time are a turn, and each turn begins with an empty prefix cache. requests.csv has the requests of
  both.

Turns come in blocks in an order of its own each: without hooks, without hooks again, and with them;
those of steps then once more in the opposite order, because a step takes longer the longer its
requests are. The guards that are part of a CUDA graph run in all three, so what they take of the
GPU's time is not in these figures (guard_time.py measures it). A variant with a page ledger is
refused: the ledger would miss what is handed out while it is out of the way.

A figure is judged as leave_it_on.py does: it *holds* if its whole 95 % interval lies at or below
the goal, and the two turns without hooks do not differ. A block takes the place of a round. The
verdicts go to FOLDER/verdict.csv. The exit code is 0 if all figures hold, 3 if some do not or were
not measured, and 1 if the server died.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import leave_it_on
from leave_it_on import BATCHES, GOALS, Verdict
from measuring import overhead, results, tracers
from measuring.fleet import Gated
from measuring.overhead import Figure
from measuring.servers import ServerDied
from served import turns
from tracer_overhead import COMPARED, said_at_end, started, switchable

VARIANTS = ("watch", "watch-no-mtp", "recorder", "tape")
STEP = "time per step"
# Metric -> the turns that it is taken from.
TAKEN_FROM = {
    "first token": "prompts",
    "first token, p99": "prompts",
    "time per token": "served",
    "throughput": "served",
}
# Device -> requests at a time: blocks of prompts, and of served; tokens of a decode; of a prompt.
# A turn of one request is short, and says little.
LOADS = {
    "cuda": ({1: (8, 2), 8: (4, 1), 64: (1, 1)}, 1150, 1000),
    "cpu": ({1: (1, 1), 4: (1, 1)}, 160, 200),
}
CALLED = {"off-again": "debugging off, again"}
Rows = Sequence[Mapping[str, Any]]


class Measured:
    """One server, and the rows that it has given."""

    def __init__(self, args: argparse.Namespace, server: Gated, device: str) -> None:
        self.args, self.server, self.device = args, server, device
        self.base = COMPARED[args.variant][0]
        self.names = {
            turns.OFF: self.base,
            turns.AGAIN: f"{self.base}-again",
            turns.ON: args.variant,
        }
        self.load = tracers.loaded(args, args.quick)
        self.steps = results.Growing(args.out / "steps.csv")
        self.requests = results.Growing(args.out / "requests.csv")
        self.on = True
        self.blocks = 0

    def round(self, number: int, most: int = 1000) -> None:
        """most: blocks of prompts, and of served."""
        batches, tokens, prompt = LOADS[self.args.device]
        for batch, (of_prompts, of_served) in batches.items():
            seed = 10_000 * self.args.seed + 100 * number + batch
            self.decode(batch, min(tokens, 100 * most), seed)
            for _ in range(min(most, of_prompts)):
                question = {"serve": batch, "count": batch, "tokens": 1, "prompt": prompt}
                self.block("prompts", question)
            for _ in range(min(most, of_served)):
                self.block("served", {"serve": batch, "count": 2 * batch, "seed": seed}, flush=True)

    def decode(self, batch: int, tokens: int, seed: int) -> None:
        wanted = Path(f"{self.server.gate}.turns")
        wanted.touch()
        question = {"serve": batch, "count": batch, "tokens": tokens, "prompt": 100, "seed": seed}
        tracers.put(self.server, self.load, question)
        wanted.unlink()
        # A prefill ends the turn in which the decode ended, and puts the hooks in place.
        tracers.put(self.server, self.load, {**question, "serve": 1, "count": 1, "tokens": 1})
        rows = [
            {
                "round": f"{self.args.seed}.{block}",
                "variant": self.names[arm],
                "batch": requests,
                "steps": steps,
                "mean_ms": round(mean, 5),
                "median_ms": round(median, 5),
            }
            for block, arm, requests, steps, mean, median in self.server.facts()["turns"]
        ]
        self.steps.add(rows, self.device)

    def block(self, phase: str, question: Mapping[str, Any], flush: bool = False) -> None:
        """Three turns with the same question; prompts that are to share nothing are drawn anew."""
        self.blocks += 1
        for place, arm in enumerate(turns.order(self.args.seed, self.blocks)):
            self.switch(arm == turns.ON)
            if flush:
                self.server.put({"flush": True})
            seed = question.get("seed") or 1_000_000 + 10 * self.blocks + place
            rows = tracers.put(self.server, self.load, {**question, "seed": seed})
            at = {"round": f"{self.args.seed}.{self.blocks}", "variant": self.names[arm]}
            at |= {"phase": phase, "batch": question["serve"]}
            self.requests.add([{**at, **row} for row in rows], self.device)
        self.switch(True)

    def switch(self, on: bool) -> None:
        if on is not self.on:
            self.server.switch()
            self.on = on


def measure(args: argparse.Namespace, folder: Path) -> int:
    """As many rounds as the time allows. Returns 1 if the server died."""
    tracers.installed()
    end = time.monotonic() + args.seconds
    variant = replace(switchable(args, args.variant), plugin="turns")
    if args.quick:
        environment = {**variant.environment, turns.VARIABLE: "8"}
        variant = replace(variant, environment=environment)
    server = Gated(args.variant, variant, args.device, folder)
    try:
        device, _ = started(server, args.variant)
        measured = Measured(args, server, device)
        tracers.fill(server, measured.load)
        warm = argparse.Namespace(**{**vars(args), "out": folder})
        Measured(warm, server, device).round(0, 1)  # it compiles kernels, and is not written down
        print(f"up, {end - time.monotonic():.0f} s left", flush=True)
        number, longest = 0, 0.0
        while time.monotonic() + 1.1 * longest < end and number < args.rounds:
            begin = time.monotonic()
            number += 1
            measured.round(number)
            longest = max(longest, time.monotonic() - begin)
        told = {"variant": args.variant, **said_at_end(server, number)}
        results.Growing(args.out / "servers.csv").add([told], device)
    except ServerDied as e:
        print(e, flush=True)
        return 1
    finally:
        server.stop()
    return 0


def judge(steps: Rows, requests: Rows) -> Iterator[Verdict]:
    """The verdicts by batch: of the variant that was measured, and of the turns alike."""
    present = {str(row["variant"]) for row in (*steps, *requests)}
    alike = "two turns alike differ"
    for variant in (v for v in VARIANTS if v in present):
        base = COMPARED[variant][0]
        for batch in sorted({*BATCHES, *(int(row["batch"]) for row in (*steps, *requests))}):
            found = figures(steps, requests, batch, base, variant)
            twins = figures(steps, requests, batch, base, f"{base}-again")
            for metric in overhead.METRICS:
                goal = GOALS.get(variant) if batch in BATCHES else None
                of, twin = found.get(metric), twins.get(metric)
                if of is not None or goal is not None:
                    yield Verdict(batch, variant, metric, of, goal, twin, alike)
                if twin is not None and f"{base}-again" in COMPARED:
                    yield Verdict(batch, f"{base}-again", metric, twin, None)


def figures(steps: Rows, requests: Rows, batch: int, base: str, variant: str) -> dict[str, Figure]:
    """What a variant costs over a base, by metric, from the blocks that have both."""
    found: dict[str, Figure] = {}
    pairs = list(blocks(steps, batch, base, variant))
    if pairs:
        # Of the means: what is done every so many steps counts, too.
        found[STEP] = overhead.figure(pairs, overhead.median_of_pairs)
    for metric, phase in TAKEN_FROM.items():
        mine = [row for row in requests if row["phase"] == phase]
        compared = overhead.compare(mine, batch, base, variant)
        if metric in compared:
            found[metric] = compared[metric]
    return found


def blocks(steps: Rows, batch: int, base: str, variant: str) -> Iterator[overhead.Pair]:
    of: dict[str, dict[str, list[float]]] = {}
    for row in steps:
        if int(row["batch"]) == batch:
            times = of.setdefault(str(row["round"]), {})
            times.setdefault(str(row["variant"]), []).append(float(row["mean_ms"]))
    for times in of.values():
        if base in times and variant in times:
            yield {0: statistics.fmean(times[base])}, {0: statistics.fmean(times[variant])}


def concluded(folder: Path, to: Path | None = None) -> int:
    """Print the table of a folder, and write its verdicts. The exit code."""
    steps, requests = (results.read(folder / f"{n}.csv")[1] for n in ("steps", "requests"))
    if not steps and not requests:
        print(f"{folder}: nothing was measured")
        return 1
    return leave_it_on.told(list(judge(steps, requests)), folder, to, CALLED)


def main() -> int:
    made = leave_it_on.parser(__doc__, "turns of few steps, to try it")
    made.add_argument("--variant", choices=VARIANTS, default="watch")
    return leave_it_on.run(made, measure, concluded, contexts=())


if __name__ == "__main__":
    raise SystemExit(main())
